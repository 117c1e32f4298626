"""`outrider serve` with a tiny encoder, through OpenAI's own client: one real process for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from patience import PATIENCE_S
from server_process import ServerProcess, serving
from tiny_encoders import HIDDEN, words, write_encoder

LIMIT = 20


@pytest.fixture(scope="module")
def live_embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_encoder(tmp_path_factory.mktemp("models") / "tiny-bert", max_seq_length=LIMIT)
    with serving(folder) as server:
        yield server


@pytest.fixture
def client(live_embedder: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{live_embedder.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    )


def test_the_client_gets_the_same_vectors_in_both_encodings(client: openai.OpenAI) -> None:
    texts = [words(*range(n)) for n in (1, 9, 4, 9)]
    coded = client.embeddings.create(model="tiny-bert", input=texts)  # the client asks for base64
    plain = client.embeddings.create(model="tiny-bert", input=texts, encoding_format="float")
    assert [item.index for item in coded.data] == [0, 1, 2, 3]
    for one, other in zip(coded.data, plain.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-7)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-6)
        assert len(one.embedding) == HIDDEN
    assert coded.usage.prompt_tokens == coded.usage.total_tokens == 1 + 9 + 4 + 9 + 2 * 4


def test_token_ids_and_dimensions(client: openai.OpenAI) -> None:
    text = client.embeddings.create(model="tiny-bert", input=words(0, 1), encoding_format="float")
    ids = client.embeddings.create(model="tiny-bert", input=[[2, 4, 5, 3]], encoding_format="float")
    few = client.embeddings.create(
        model="tiny-bert", input=words(0, 1), dimensions=5, encoding_format="float"
    )
    assert text.data[0].embedding == ids.data[0].embedding
    head = np.array(text.data[0].embedding[:5])
    np.testing.assert_allclose(few.data[0].embedding, head / np.linalg.norm(head), atol=1e-6)


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reads 20 at most") as caught:
        client.embeddings.create(model="tiny-bert", input=["w1", words(*range(30))])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="is an embedding model and generates no text"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError, match="/v1/images is not served"):
        client.images.generate(prompt="a cat")
    with pytest.raises(openai.NotFoundError, match="/v1/audio is not served"):
        client.audio.transcriptions.create(file=("a.wav", b"RIFF"), model="whisper-1")
    with pytest.raises(openai.NotFoundError, match="/v1/moderations is not served"):
        client.moderations.create(input="a")


def test_a_cut_input_equals_the_input_of_that_length(client: openai.OpenAI) -> None:
    long, short = words(*range(40)), words(*range(LIMIT - 2))
    cut = client.embeddings.create(
        model="tiny-bert", input=long, extra_body={"truncate_prompt_tokens": -1}, encoding_format="float"
    )
    whole = client.embeddings.create(model="tiny-bert", input=short, encoding_format="float")
    assert cut.data[0].embedding == whole.data[0].embedding


def test_the_other_routes_of_an_embedding_server(live_embedder: ServerProcess) -> None:
    body = {"query": words(1, 2), "documents": [words(3), words(1, 2)]}
    assert live_embedder.post("/v1/rerank", body).json()["results"][0]["index"] == 1
    tokens = live_embedder.post("/tokenize", {"prompt": words(0)}).json()
    assert (tokens["tokens"], tokens["max_model_len"]) == ([2, 4, 3], LIMIT)
    assert live_embedder.post("/detokenize", {"tokens": [4]}).json() == {"prompt": "w0"}
    assert httpx.get(f"{live_embedder.url}/health", timeout=PATIENCE_S).json() == {"status": "ready"}
    assert live_embedder.get("/v1/models")["data"][0]["max_model_len"] == LIMIT
    assert live_embedder.get("/v1/status")["model"]["drafter"] == "none"
    assert live_embedder.metric('outrider_embedding_inputs_total{api="rerank"}') >= 3
    assert "embeddings of 32 values, normalised; mean pooling" in live_embedder.banner
    live_embedder.wait_until_idle()
