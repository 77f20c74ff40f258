"""Token files of nanoGPT and Megatron-LM: every block once, of any size, from the command line and in scripts."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from ebbflow import ElasticSampler, workloads
from ebbflow.cli.main import app
from ebbflow.errors import ConfigError, DataError, EbbflowError
from ebbflow.record import read_record
from ebbflow.workloads import TokenFiles


def write_raw(path: Path, tokens: Any, dtype: str = "<u2") -> Path:
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def write_megatron(folder: Path, documents: list[list[int]], *, code: int = 8, dtype: str = "<u2") -> Path:
    """Both files, as megatron/core/datasets/indexed_dataset.py describes them."""
    write_raw(folder / "text_document.bin", [token for document in documents for token in document], dtype)
    sizes = np.array([len(document) for document in documents], "<i4")
    places = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    index += sizes.tobytes() + places.astype("<i8").tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    (folder / "text_document.idx").write_bytes(index)
    return folder / "text_document.bin"


def test_a_block_is_followed_by_the_token_that_is_the_last_target(tmp_path: Path) -> None:
    data = TokenFiles(write_raw(tmp_path / "train.bin", range(11)), context=4)
    # 11 tokens: blocks 0-4 and 4-8, and tokens 9 and 10 do not fill one.
    assert [(x.tolist(), y.tolist()) for x, y in (data[0], data[1])] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]
    assert len(data) == 2
    x, y = data.batch(np.array([1, 0]), train=True)
    assert x.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert y[:, 0].tolist() == [5, 1]
    with pytest.raises(IndexError):
        data[2]


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
def test_an_index_of_megatron_says_the_type_of_the_tokens(tmp_path: Path, code: int, dtype: str) -> None:
    path = write_megatron(tmp_path, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], code=code, dtype=dtype)
    data = TokenFiles(path, context=4)
    assert [x.tolist() for x, _ in (data[0], data[1])] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", range(9))  # two blocks
    write_raw(tmp_path / "b.bin", range(100, 105))  # one
    data = TokenFiles(tmp_path, context=4)
    assert [data[i][0][0].item() for i in range(len(data))] == [0, 4, 100]


def test_every_block_comes_once_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", range(8 * 50 + 1))
    write_raw(tmp_path / "b.bin", range(1000, 1000 + 8 * 23 + 1))
    data = TokenFiles(tmp_path, context=8)
    seen: list[int] = []
    first = ElasticSampler(data, "fixed(6)", local_batch=3)
    for x, _ in DataLoader(data, batch_sampler=first):
        seen += x[:, 0].tolist()
        if first.consume().step == 4:
            break
    assert len(seen) == 27
    del seen[24:]  # one of two micro-batches of the fifth step; the state is after four of six blocks each
    second = ElasticSampler(data, "follow(5)", rank=0, world_size=1)
    second.load_state_dict(first.state_dict())
    for x, _ in DataLoader(data, batch_sampler=second):
        seen += x[:, 0].tolist()
        second.consume()
    assert sorted(seen) == [*range(0, 400, 8), *range(1000, 1184, 8)]


def test_sixty_four_gibibytes_are_opened_and_resumed_at_once(tmp_path: Path) -> None:
    """A sparse file, which takes no room on the disk; reading it, or an order of its blocks, would take minutes."""
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 36)
        file.seek((1 << 36) - 4 * 1024 * 2)
        file.write(np.arange(4 * 1024, dtype="<u2").tobytes())
    data = TokenFiles(path, context=1024)
    blocks = ((1 << 35) - 1) // 1024  # of two bytes per token
    assert len(data) == blocks
    assert data[blocks - 1][0][:3].tolist() == [2048, 2049, 2050]  # the last 1024 tokens have no block: no target
    sampler = ElasticSampler(data, "fixed(480)", local_batch=12)
    sampler.load_state_dict(sampler.state_dict() | {"step": 60_000, "position": 480 * 60_000})
    x, _ = next(iter(DataLoader(data, batch_sampler=sampler)))
    assert x.shape == (12, 1024)


def test_what_is_sent_to_another_process_is_small(tmp_path: Path) -> None:
    data = TokenFiles(write_raw(tmp_path / "train.bin", np.arange(60_000)), context=4)
    assert data[3][0].tolist() == [12, 13, 14, 15]  # the file is mapped now
    sent = pickle.dumps(data)
    assert len(sent) < 2_000
    assert pickle.loads(sent)[3][0].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda f: TokenFiles(f / "none.bin", context=4), DataError, "No such file.*expected a file of tokens"),
        (lambda f: TokenFiles(f / "empty", context=4), DataError, r"no files \*.bin"),
        (lambda f: TokenFiles([], context=4), DataError, "no token files"),
        (lambda f: TokenFiles(f / "odd.bin", context=4), DataError, "9 bytes are no whole number of uint16 tokens"),
        (lambda f: TokenFiles(f / "a.bin", context=40), DataError, "11 tokens in 1 file.* give 0 blocks"),
        (lambda f: TokenFiles(f / "a.bin", context=0), ConfigError, "context is 0"),
        (lambda f: TokenFiles(f / "a.bin", context=4, dtype="float32"), ConfigError, "type of tokens is 'float32'"),
        (lambda f: TokenFiles(f / "a.bin", context=4, vocabulary=6)[1], DataError, "token 6 near position 4 is not in"),
        (lambda f: TokenFiles(f / "bad.bin", context=4), DataError, "not an index of Megatron-LM"),
        (lambda f: TokenFiles(f / "m" / "text_document.bin", context=4), DataError, "index describes 14 bytes.*has 12"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, make: Any, error: type[EbbflowError], text: str) -> None:
    write_raw(tmp_path / "a.bin", range(11))
    (tmp_path / "odd.bin").write_bytes(bytes(9))
    write_raw(tmp_path / "bad.bin", range(11))
    (tmp_path / "bad.idx").write_bytes(b"something else")
    (tmp_path / "empty").mkdir()
    (tmp_path / "m").mkdir()
    whole = write_megatron(tmp_path / "m", [[1, 2, 3], [4, 5, 6, 7]])
    whole.write_bytes(whole.read_bytes()[:-2])
    with pytest.raises(error, match=text):
        make(tmp_path)


def test_validation_has_blocks_of_its_own(tmp_path: Path) -> None:
    small = "token-gpt(context=8, vocabulary=16, layers=1, heads=1, width=8, valid=3)"
    write_raw(tmp_path / "tokens.bin", np.arange(801) % 16)  # 100 blocks
    task = workloads.build(small, data=tmp_path / "tokens.bin")
    assert (len(task.train), len(task.valid)) == (97, 3)
    (tmp_path / "both").mkdir()
    write_raw(tmp_path / "both" / "train.bin", np.arange(801) % 16)
    write_raw(tmp_path / "both" / "val.bin", np.arange(17) % 16)
    task = workloads.build(small, data=tmp_path / "both")
    assert (len(task.train), len(task.valid)) == (100, 2)
    with pytest.raises(ConfigError, match="token-gpt: layers is 0"):
        workloads.build("token-gpt(layers=0)", data=tmp_path / "both")


def test_a_token_file_is_trained_on_from_the_command_line(tmp_path: Path) -> None:
    write_raw(tmp_path / "tokens.bin", np.arange(8 * 330 + 1) % 16)  # 330 blocks, of which 30 are for validation
    small = "token-gpt(context=8, vocabulary=16, layers=1, heads=2, width=32, valid=30)"
    command = ["train", small, "--data", str(tmp_path / "tokens.bin"), "--trace", "random-levels(2, 4, every=2min)"]
    options = ["--rule", "sqrt", "--epochs", "3", "--lr", "0.01", "--local-batch", "8", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = read_record(tmp_path / "run" / "record.jsonl")
    assert sum(row.batch for row in run.steps) == 3 * 300
    assert run.validations[-1].metrics["loss"] < 0.7 * np.log(16)
