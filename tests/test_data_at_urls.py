"""Data at a URL: fetched once, checked, and one sentence when the network is not there."""

import functools
import http.server
import logging
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from torl_grading import Grader
from torl_trl import data
from torl_trl.data import DataError, load_problems, read_rows
from torl_trl.errors import UserError
from torl_trl.prompts import TORL_TEMPLATE
from torl_trl.script_arguments import ToRLScriptArguments

ROWS = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder and counts what is asked for; `cut` ends every answer half-way."""

    asked = 0
    cut = False

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass

    def copyfile(self, source, outputfile) -> None:
        self.server.asked += 1
        content = source.read()
        outputfile.write(content[: len(content) // 2] if self.server.cut else content)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "served"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_at_a_url_is_fetched_once(server, caplog):
    caplog.set_level(logging.INFO, "torl_trl")
    for _ in range(2):
        assert read_rows(f"{server.url}/train.parquet") == ROWS
    assert server.asked == 1
    assert [record.message.partition(" to ")[0] for record in caplog.records] == [
        f"Fetched {server.url}/train.parquet"
    ]


def test_a_transfer_that_is_cut_leaves_nothing_behind(server, tmp_path):
    server.cut = True
    with pytest.raises(DataError, match="cannot be fetched"):
        read_rows(f"{server.url}/train.parquet")
    assert list((tmp_path / "cache").iterdir()) == []
    server.cut = False
    assert read_rows(f"{server.url}/train.parquet") == ROWS


@pytest.mark.parametrize("place", ["{server}/none.parquet", "http://127.0.0.1:1/train.parquet", "http://[/a.jsonl"])
def test_what_cannot_be_fetched_is_one_sentence(place, server):
    url = place.format(server=server.url)
    with pytest.raises(DataError) as error:
        read_rows(url)
    assert str(error.value).startswith(f"Data {url!r} cannot be fetched (")
    assert str(error.value).endswith("fetch the file where there is one and give its path instead.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("known", "said"), [(3, False), (28_740, True)])
def test_a_wrong_number_of_rows_is_said(known, said, server, monkeypatch, caplog):
    url = f"{server.url}/train.parquet"
    monkeypatch.setattr(data, "KNOWN_ROWS", {url: known})

    def tokenizer(texts):
        return {"input_ids": [[0]] * len(texts)}

    with Grader(num_workers=1) as grader:
        assert len(load_problems(url, template=TORL_TEMPLATE, tokenizer=tokenizer, grader=grader)) == 3
    assert (f"train data: 3 rows instead of 28740: {url} has changed." in caplog.text) is said


def test_training_data_at_a_url_are_not_the_held_out_problems():
    with pytest.raises(UserError, match="one file, whose problems are trained"):
        ToRLScriptArguments(dataset_name="https://a.b/train.parquet").eval_data()
