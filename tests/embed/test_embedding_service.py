"""From texts to vectors: what is read, what is refused and by which name, and the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.build_embedder import Embedder, build_embedder
from outrider.embed.service import EmbeddingService, NotStarted
from outrider.embed.tokenizer import load_tokenizer
from outrider.embed.vectors import as_base64, cosine, embedding, normalised, sigmoid
from outrider.models.errors import ModelUnavailable
from outrider.pooling import PoolingFacts, TokenInput
from outrider.request import InvalidRequest, PromptTooLong
from tiny_encoders import HIDDEN, VOCAB_SIZE, words, write_encoder

LIMIT = 12  # tokens of an input
FACTS = PoolingFacts("fake", "embedding", 4, LIMIT, VOCAB_SIZE, "mean", True, pass_tokens=16)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = write_encoder(tmp_path_factory.mktemp("models") / "bert", max_seq_length=LIMIT)
    made = build_embedder(folder, "bert")
    yield made
    made.close()


def read(service: EmbeddingService, *inputs: Any, truncate: int | None = None, most: int = 1000) -> Any:
    return asyncio.run(service.read(inputs, truncate, most))


def test_texts_get_special_tokens_and_ids_get_none(embedder: Embedder) -> None:
    assert read(embedder.service, words(0, 5), [7, 8]) == [TokenInput((2, 4, 9, 3)), TokenInput((7, 8))]


def test_the_padding_and_truncation_of_the_file_do_not_apply(embedder: Embedder) -> None:
    short, long = read(embedder.service, words(1), words(*range(10)))
    assert (len(short), len(long)) == (3, 12)


def test_a_truncated_text_keeps_its_special_tokens(embedder: Embedder) -> None:
    text, ids = read(embedder.service, words(*range(30)), list(range(30)), truncate=5)
    assert text.ids == (2, 4, 5, 6, 3)
    assert ids.ids == (0, 1, 2, 3, 4)
    (far,) = read(embedder.service, words(*range(30)) * 500, truncate=LIMIT)
    assert len(far) == LIMIT


def test_pairs_have_types_and_only_documents_are_cut(embedder: Embedder) -> None:
    pairs = asyncio.run(embedder.service.read_pairs(words(0, 1), [words(9), words(*range(30))], 8, 1000))
    assert pairs[0] == TokenInput((2, 4, 5, 3, 13, 3), (0, 0, 0, 0, 1, 1))
    assert pairs[1].ids == (2, 4, 5, 3, 4, 5, 6, 3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (words(*range(11)), PromptTooLong, r"input\[1\] has 13 tokens, and the model reads 12 at most"),
        ("x " * 300, PromptTooLong, r"input\[1\] has 600 characters, .* truncate_prompt_tokens: -1"),
        ([1] * 13, PromptTooLong, r"input\[1\] has 13 tokens"),
        ([], InvalidRequest, r"input\[1\] has no tokens"),
        ([3, VOCAB_SIZE], InvalidRequest, rf"token id {VOCAB_SIZE}, outside the vocabulary of {VOCAB_SIZE}"),
        ([-1], InvalidRequest, "token id -1"),
    ],
)
def test_bad_inputs_are_named(embedder: Embedder, given: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        read(embedder.service, words(1), given)


def test_inputs_may_have_other_names(embedder: Embedder) -> None:
    with pytest.raises(InvalidRequest, match=r"^documents\[0\] has no tokens"):
        asyncio.run(embedder.service.read([[1], []], None, 1000, ["query", "documents[0]"]))


def test_all_inputs_together_are_limited(embedder: Embedder) -> None:
    with pytest.raises(InvalidRequest, match="more than 20 tokens together"):
        read(embedder.service, *[words(1, 2, 3)] * 100, most=20)


def test_a_query_that_leaves_no_room_is_an_error(embedder: Embedder) -> None:
    with pytest.raises(PromptTooLong, match=r"documents\[0\], with the query, has 17 tokens"):
        asyncio.run(embedder.service.read_pairs(words(*range(14)), [words(9)], LIMIT, 1000))


def test_vectors_come_in_the_order_of_the_inputs(embedder: Embedder) -> None:
    inputs = read(embedder.service, words(1, 2, 3), words(4), words(1, 2, 3))
    one, other, again = asyncio.run(embedder.service.embed(inputs))
    assert one.shape == (HIDDEN,)
    assert one.tobytes() == again.tobytes() != other.tobytes()


def test_inputs_that_do_not_start_in_time_are_given_up() -> None:
    class Busy:
        facts = FACTS

        def submit(self, inputs: Any) -> Any:
            from outrider.embed.passes import EmbeddingJob

            self.job = EmbeddingJob(inputs)
            return self.job

    busy: Any = Busy()
    service = EmbeddingService(busy, None)  # type: ignore[arg-type]
    with pytest.raises(NotStarted):
        asyncio.run(service.embed([TokenInput((1,))], start_within_s=0.001))
    assert busy.job.is_abandoned


def test_a_waiter_that_is_cancelled_gives_its_inputs_up() -> None:
    from outrider.embed.passes import EmbeddingJob

    class Busy:
        facts = FACTS
        job = EmbeddingJob([TokenInput((1,))])

        def submit(self, inputs: Any) -> EmbeddingJob:
            return self.job

    async def wait() -> None:
        service = EmbeddingService(Busy(), None)  # type: ignore[arg-type]
        waiting = asyncio.create_task(service.embed([TokenInput((1,))]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(wait())
    assert Busy.job.is_abandoned
    Busy.job.deliver(0, np.zeros(4, np.float32))  # a pass that had begun delivers all the same


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        load_tokenizer(tmp_path)


# -- vectors ---------------------------------------------------------------------------------------------


def vector(*values: float) -> Any:
    return np.array(values, np.float32)


def test_fewer_dimensions_are_normalised_again() -> None:
    np.testing.assert_allclose(embedding(vector(3, 4, 12, 0), FACTS), [3 / 13, 4 / 13, 12 / 13, 0], atol=1e-7)
    np.testing.assert_allclose(embedding(vector(3, 4, 12, 0), FACTS, 2), [0.6, 0.8], atol=1e-7)


def test_embeddings_that_the_model_does_not_normalise_stay_as_they_are() -> None:
    plain = PoolingFacts("fake", "embedding", 4, LIMIT, VOCAB_SIZE, "mean", False, pass_tokens=16)
    assert list(embedding(vector(3, 4, 12, 0), plain, 2)) == [3, 4]


def test_a_vector_of_zeros_has_no_nan() -> None:
    assert list(normalised(vector(0, 0))) == [0, 0]
    assert cosine(vector(0, 0), vector(1, 0)) == 0


def test_scores_and_base64() -> None:
    assert cosine(vector(1, 1), vector(2, 2)) == pytest.approx(1, abs=1e-6)
    assert (sigmoid(0.0), sigmoid(-1e9), sigmoid(1e9)) == (0.5, 0.0, 1.0)
    assert as_base64(vector(1.0, -2.0)) == "AACAPwAAAMA="
