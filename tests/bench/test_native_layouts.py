"""The folder that all servers of the comparison of native MTP read."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import mlx.core as mx
import pytest
from benchmarks.native_mtp.layouts import CannotConvert, common_config, write_common_folder

from outrider.models.heads.head_files import find_head

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_vlm")
    return write_common_folder(TINY, tmp_path_factory.mktemp("native") / "common")


def tensors(file: Path) -> dict[str, mx.array]:
    found = mx.load(str(file))
    assert isinstance(found, dict)
    return found


def test_the_language_model_has_the_same_numbers_in_float32(folder: Path) -> None:
    stored, found = tensors(TINY / "model.safetensors"), tensors(folder / "model.safetensors")
    assert stored.keys() == {name for name in found if not name.startswith("vision_tower.")}
    for name, array in stored.items():
        assert found[name].dtype == mx.float32
        assert mx.array_equal(found[name], array.astype(mx.float32)), name


def test_the_head_is_where_each_server_looks_for_it(folder: Path) -> None:
    stored = tensors(TINY / "mtp.safetensors")
    for file in ("mtp.safetensors", "mtp/weights.safetensors"):
        found = tensors(folder / file)
        assert found.keys() == stored.keys()
        assert all(mx.array_equal(found[name], array.astype(mx.float32)) for name, array in stored.items())
    assert find_head(folder) is not None
    manifest = json.loads((folder / "mtp" / "manifest.json").read_text())
    assert manifest["rmsnorm_weight_format"] == "mlx_gamma"


def test_the_model_file_has_no_tensor_of_the_head(folder: Path) -> None:
    """mlx-lm would add 1 to the norms of such a file."""
    assert not [name for name in tensors(folder / "model.safetensors") if "mtp." in name]


def test_mlx_vlm_loads_every_tensor(folder: Path) -> None:
    """Its load is strict: a missing vision encoder, or a name of the head among the model's, is an error."""
    utils = pytest.importorskip("mlx_vlm.utils")
    model = utils.load_model(folder)
    stored = tensors(TINY / "model.safetensors")
    name = "language_model.model.norm.weight"
    assert mx.array_equal(model.language_model.model.norm.weight, stored[name].astype(mx.float32))


def test_the_chat_template_takes_a_text_and_a_list_of_parts(folder: Path) -> None:
    own, common = (
        json.loads((path / "tokenizer_config.json").read_text())["chat_template"] for path in (TINY, folder)
    )
    text = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2."}]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in text]
    expected = jinja2.Template(own).render(messages=text, add_generation_prompt=True)
    for messages in (text, parts):
        assert jinja2.Template(common).render(messages=messages, add_generation_prompt=True) == expected
    assert jinja2.Template(own).render(messages=parts) != jinja2.Template(common).render(messages=parts)


def test_sections_cover_half_of_the_rotated_part() -> None:
    text = {"head_dim": 64, "hidden_size": 8, "vocab_size": 100}
    for factor, half in ((0.25, 8), (0.5, 16), (1.0, 32)):
        rope = {"rope_type": "default", "partial_rotary_factor": factor}
        config = common_config({"text_config": {**text, "rope_parameters": rope}})
        assert sum(config["text_config"]["rope_parameters"]["mrope_section"]) == half
        assert config["image_token_id"] == 100
        assert config["vision_config"]["out_hidden_size"] == 8


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CannotConvert, match="no MTP head in a file beside the model"):
        write_common_folder(tmp_path, tmp_path / "out")


def test_a_head_whose_norms_may_lack_their_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), {"mtp.norm.weight": mx.zeros(4)}, {"format": "pt"})
    with pytest.raises(CannotConvert, match="not marked as MLX's format"):
        write_common_folder(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
