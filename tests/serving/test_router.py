"""The router in front of real servers: choosing, failing over, taking streams up, and doing the door's work once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from live_server import HELLO, MODEL, Live, live_server, wait_for
from router_parts import Foreign, Relay, Routed, begin_stream, routed, write_chunk, write_json

from swift.config.serving import ServeConfig
from swift.serving.app import make_app
from swift.serving.limits import read_keys
from swift.serving.router.app import ADAPTERS, FORWARDED
from swift.serving.services import Services

CHAT = "/v1/chat/completions"
OTHER = {"model": "other", "messages": HELLO, "stream": True}


@pytest.fixture(scope="module")
def two(tiny_model_dir: Path, serving_backend: Any) -> Iterator[tuple[Live, Live]]:
    """Two servers of one model."""
    with (
        live_server(tiny_model_dir, backend=serving_backend, admin_api_key="boss") as first,
        live_server(tiny_model_dir, backend=serving_backend, admin_api_key="boss") as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def relay(two: tuple[Live, Live]) -> Iterator[Relay]:
    relay = Relay(two[0].url)
    yield relay
    relay.close()


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def _text(answer: str) -> str:
    return "".join(
        choice["delta"].get("content") or "" for each in _events(answer) for choice in each.get("choices", [])
    )


def _tokens(answer: str) -> list[int]:
    return [t for each in _events(answer) for choice in each["choices"] for t in choice.get("token_ids") or []]


def test_every_path_of_a_server_is_one_of_the_router() -> None:
    async def paths() -> set[str]:
        config = ServeConfig()
        gate: Any = make_app(Services(config, read_keys(config)))
        return {path for path, ways in gate.app.openapi()["paths"].items() if "post" in ways}

    assert asyncio.run(paths()) == FORWARDED | ADAPTERS


def test_the_client_sees_one_server(two: tuple[Live, Live]) -> None:
    with routed(two[0].url, two[1].url) as router:
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        body = {"messages": HELLO, "max_tokens": 9, "temperature": 0}
        expected = two[0].post(CHAT, body).json()["choices"]
        for _ in range(2):  # once on each
            assert router.post(CHAT, body).json()["choices"] == expected
        streamed = router.post(CHAT, {**body, "stream": True})
        assert _text(streamed.text) == expected[0]["message"]["content"]
        assert streamed.text.endswith("data: [DONE]\n\n") and ": usage" not in streamed.text
        assert streamed.headers["content-type"].startswith("text/event-stream")
        for path in ("/v1/completions", "/v1/responses", "/tokenize"):
            field = "input" if path == "/v1/responses" else "prompt"
            assert router.post(path, {"model": MODEL, field: "Hello"}).status_code == 200
        assert router.get("/openapi.json").json()["paths"].keys() == two[0].get("/openapi.json").json()["paths"].keys()
        # what is wrong with a request is said as the server says it
        for wrong in ({"messages": []}, {"messages": HELLO, "n": 0}, {"messages": HELLO, "model": "absent"}):
            mine, theirs = router.post(CHAT, wrong), two[0].post(CHAT, wrong)
            assert (mine.status_code, mine.json()) == (theirs.status_code, theirs.json())
        assert router.get("/v1/nothing").status_code == 404
        assert router.get(CHAT).status_code == 405
        assert router.get("/v1/models/absent").status_code == 404
        assert router.get("/ready").json()["replicas"] == {"r0": "ready", "r1": "ready"}
        metrics = router.get("/metrics").text
        counted = {line.split(" ")[0]: line.split(" ")[1] for line in metrics.splitlines() if not line.startswith("#")}
        assert int(counted['swift_replica_requests_total{replica="r0"}']) >= 2
        assert int(counted['swift_replica_requests_total{replica="r1"}']) >= 2
        assert 'swift_engine_generated_tokens_total{replica="r1",model="tiny"}' in counted
        assert float(counted["swift_request_generated_tokens_sum"]) >= 27  # streams count too
        assert metrics.count("# TYPE swift_engine_steps_total") == 1


def test_a_broken_stream_goes_on_elsewhere(two: tuple[Live, Live], relay: Relay) -> None:
    with routed(relay.url, two[1].url) as router:
        assert router.server.fleet is not None
        num_continued = 0
        for cut_after, more in [
            (0, {"temperature": 0}), (100, {"temperature": 0}), (700, {"temperature": 0}), (2500, {"temperature": 0}),
            (2501, {"temperature": 1.0, "seed": 5}), (3000, {"temperature": 1.0, "seed": 7, "n": 2}),
            (6000, {"temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2}),
        ]:  # fmt: skip
            body = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "stream": True,
                    "stream_options": {"include_usage": True}, **more}  # fmt: skip
            expected = two[1].post(CHAT, body).text
            relay.cut_after, before = cut_after, relay.num_cut
            while relay.num_cut == before:  # until the broken one was chosen
                wait_for(lambda: router.state(0) == "ready")
                answer = router.post(CHAT, body).text
                assert _tokens(answer) == _tokens(expected), more
                assert _text(answer) == _text(expected)
                assert answer.count("[DONE]") == 1 and '{"error"' not in answer
                assert len({each["id"] for each in _events(answer)}) == 1
                assert _events(answer)[-1]["usage"]["completion_tokens"] == 40 * more.get("n", 1)
            relay.cut_after = None
            num_continued += cut_after > 500
        assert router.server.fleet.num_continued == num_continued
        # draws without a seed can be continued too, and texts
        relay.cut_after = 2000
        for path, body in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "Hello"})):
            before = relay.num_cut
            while relay.num_cut == before:
                wait_for(lambda: router.state(0) == "ready")
                more = {
                    "max_tokens": 40,
                    "ignore_eos": True,
                    "temperature": 1.0,
                    "stream": True,
                    "return_token_ids": True,
                }
                answer = router.post(path, {**body, **more}).text
                assert len(_tokens(answer)) == 40 and '{"error"' not in answer
        relay.cut_after = None


def test_a_broken_whole_answer_is_asked_for_again(two: tuple[Live, Live], relay: Relay) -> None:
    with routed(relay.url, two[1].url) as router:
        for cut_after in (0, 30, 300):
            relay.cut_after, before = cut_after, relay.num_cut
            while relay.num_cut == before:
                wait_for(lambda: router.state(0) == "ready")
                answer = router.post(CHAT, {"messages": HELLO, "max_tokens": 9})
                assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 9
        relay.cut_after = None
        assert router.metric("swift_router_retries_total") >= 3


def test_what_cannot_be_continued_ends_with_an_error(two: tuple[Live, Live], relay: Relay) -> None:
    with routed(relay.url) as router:  # nobody else is there
        relay.cut_after = 1500
        answer = router.post(CHAT, {"messages": HELLO, "max_tokens": 40, "ignore_eos": True, "stream": True})
        relay.cut_after = None
        assert answer.status_code == 200 and "[DONE]" not in answer.text
        *pieces, error = _events(answer.text)
        assert error["error"]["code"] == "no_replica" and all("choices" in piece for piece in pieces)
    with routed(relay.url, two[1].url) as router:  # ids of items are drawn anew each time
        body = {"input": "Hello", "max_output_tokens": 40, "stream": True}
        relay.cut_after, before = 1500, relay.num_cut
        while relay.num_cut == before:
            wait_for(lambda: router.state(0) == "ready")
            answer = router.post("/v1/responses", body)
        relay.cut_after = None
        assert _events(answer.text)[-1]["error"]["code"] == "replica_lost"


def test_a_request_that_kills_replicas_does_not_go_through_all(two: tuple[Live, Live]) -> None:
    relays = [Relay(two[0].url) for _ in range(3)]
    with routed(*(each.url for each in relays)) as router:
        for each in relays:
            each.cut_after = 0
        answer = router.post(CHAT, {"messages": HELLO, "max_tokens": 2})
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
        assert sum(each.num_cut for each in relays) == 2
    for each in relays:
        each.close()


def test_nobody_is_there(two: tuple[Live, Live]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"http://127.0.0.1:{listener.getsockname()[1]}"
    relay = Relay(two[0].url)
    with routed(free, ready=0) as router:
        answer = router.post(CHAT, {"messages": HELLO})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert int(answer.headers["retry-after"]) >= 1
        assert router.get("/ready").status_code == 503 and router.get("/health").status_code == 200
    with routed(relay.url, free, ready=1) as router:
        assert router.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status_code == 200
        relay.close()
        for _ in range(2):  # found out by a request, then known
            answer = router.post(CHAT, {"messages": HELLO, "max_tokens": 2})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "no_replica"


def test_a_replica_that_hangs_is_given_up(two: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.serving.router.fleet._PROBE_S", 0.3)
    relay = Relay(two[0].url)
    with routed(relay.url, two[1].url) as router:
        relay.deaf = True
        answers = [router.post(CHAT, {"messages": HELLO, "max_tokens": 3}) for _ in range(2)]  # one of them goes there
        assert [answer.status_code for answer in answers] == [200, 200]
        assert router.state(0) == "down"
        relay.deaf = False
        wait_for(lambda: router.state(0) == "ready")
    relay.close()


def test_a_leaving_client_ends_the_answer(two: tuple[Live, Live]) -> None:
    with routed(two[0].url) as router:
        for stream in (True, False):
            body = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True, "stream": stream}
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            data = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as client:
                client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
                wait_for(lambda: two[0].num_answers == 1)
            wait_for(lambda: two[0].num_answers == 0 and router.metric("swift_requests_active") == 1)
        assert router.metric("swift_disconnects_total") == 2


def test_events_come_as_they_are_made() -> None:
    go_on = threading.Event()

    async def answer(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        write_chunk(writer, b'data: {"a": 1}\n\ndata: {"b"')
        await writer.drain()
        await asyncio.to_thread(go_on.wait, 30)
        write_chunk(writer, b": 2}\n\n")
        write_chunk(writer, b"")

    foreign = Foreign(answer)
    with routed(foreign.url) as router, httpx2.stream("POST", router.url + CHAT, json=OTHER, timeout=30) as response:
        parts = response.iter_raw()
        assert next(parts) == b'data: {"a": 1}\n\n'  # whole events only
        go_on.set()
        assert b"".join(parts) == b'data: {"b": 2}\n\n'
    assert json.loads(foreign.seen[0][1]) == OTHER  # as it came: others know nothing of our ways
    assert "x-swift" not in foreign.seen[0][0].lower()
    foreign.close()


def test_others_streams_end_with_an_error_when_they_break() -> None:
    async def broken(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        if b'"late"' in body:
            write_chunk(writer, b'data: {"a": 1}\n\ndata: {"b"')
            await writer.drain()
        writer.transport.abort()

    async def whole(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        write_chunk(writer, b'data: {"whole": 1}\n\n')
        write_chunk(writer, b"")

    foreign, other = Foreign(broken), Foreign(whole)
    with routed(foreign.url, other.url) as router:
        late, early = [], []
        for user, answers in (("late", late), ("early", early)):
            while len(foreign.seen) < (1 if user == "late" else 2):
                wait_for(lambda: router.state(0) == "ready")
                answers.append(router.post(CHAT, {**OTHER, "user": user}).text)
        piece, error = _events(late[-1])
        assert (
            piece == {"a": 1} and error["error"]["code"] == "replica_lost" and error["error"]["type"] == "server_error"
        )
        assert set(early) == {'data: {"whole": 1}\n\n'}  # nothing had been sent yet
    foreign.close()
    other.close()


def test_a_busy_replica_sends_to_another() -> None:
    async def full(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        write_json(writer, 429, {"error": {"message": "full"}})

    async def free(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        write_json(writer, 200, {"usage": {"prompt_tokens": 3, "completion_tokens": 4}})

    busy, idle = Foreign(full), Foreign(free)
    with routed(busy.url, idle.url) as router:
        assert [router.post(CHAT, OTHER).status_code for _ in range(4)] == [200] * 4
        assert busy.seen and router.state(0) == "ready"
        assert router.metric("swift_request_generated_tokens_sum") == 16
    with routed(busy.url) as router:
        answer = router.post(CHAT, OTHER)
        assert answer.status_code == 429 and answer.json() == {"error": {"message": "full"}}
    busy.close()
    idle.close()


def test_models_are_looked_for_where_they_are(two: tuple[Live, Live]) -> None:
    async def free(head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        write_json(writer, 200, {"mine": True})

    foreign = Foreign(free)
    with routed(two[0].url, foreign.url) as router:
        assert [entry["id"] for entry in router.get("/v1/models").json()["data"]] == [MODEL, "other"]
        for _ in range(3):
            assert router.post(CHAT, {"model": "other", "messages": HELLO}).json() == {"mine": True}
            answer = router.post(CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 2})
            assert answer.json()["model"] == MODEL
        absent = router.post(CHAT, {"model": "absent", "messages": HELLO})
        assert absent.status_code == 404 and "tiny, other" in absent.json()["error"]["message"]
    foreign.close()


def test_keys_and_limits_hold_once_for_all(two: tuple[Live, Live], tiny_model_dir: Path, serving_backend: Any) -> None:
    short = {"messages": HELLO, "max_tokens": 2}
    with (
        live_server(tiny_model_dir, backend=serving_backend, api_key=["inner"]) as closed,
        routed(
            closed.url, keys=("inner", None), api_key=["outer"], requests_per_minute=3, max_request_bytes=5000
        ) as router,
    ):
        assert router.post(CHAT, short).status_code == 401
        assert router.post(CHAT, short, headers={"Authorization": "Bearer inner"}).status_code == 401
        outer = {"Authorization": "Bearer outer"}
        assert router.post(CHAT, {**short, "user": "x" * 6000}, headers=outer).status_code == 413
        assert [router.post(CHAT, short, headers=outer).status_code for _ in range(3)] == [200, 200, 429]
    with routed(two[0].url, api_key=["outer"], tokens_per_minute=40) as router:
        # streams count, though they don't say what they took
        body = {**short, "max_tokens": 30, "ignore_eos": True, "stream": True}
        assert [router.post(CHAT, body, headers=outer).status_code for _ in range(2)] == [200, 429]


def test_adapters_are_loaded_by_all_or_none(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, two: tuple[Live, Live]
) -> None:
    folder = _adapter(tiny_model_dir, tmp_path_factory.mktemp("router-adapter"))
    boss = {"Authorization": "Bearer boss"}
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    with (
        live_server(tiny_model_dir, admin_api_key="boss") as first,
        live_server(tiny_model_dir, admin_api_key="boss") as second,
    ):
        relay = Relay(second.url)
        with routed(first.url, relay.url, keys=(None, "boss"), admin_api_key="boss") as router:
            wanted = {"lora_name": "tuned", "lora_path": str(folder)}

            def names(live: Live) -> list[str]:
                return [entry["id"] for entry in live.get("/v1/models").json()["data"]]

            assert router.post(load, wanted).status_code == 403
            assert router.post(load, {}, headers=boss).status_code == 400
            assert router.post(load, wanted, headers=boss).status_code == 200
            assert names(first) == names(second) == [MODEL, "tuned"]
            for _ in range(2):
                body = {"model": "tuned", "messages": HELLO, "max_tokens": 2}
                assert router.post(CHAT, body).json()["model"] == "tuned"
            assert router.post(unload, {"lora_name": "tuned"}, headers=boss).status_code == 200
            assert names(first) == names(second) == [MODEL]
            # one has the name already: the other one doesn't keep it
            assert second.post(load, wanted, headers=boss).status_code == 200
            assert router.post(load, wanted, headers=boss).status_code == 400
            assert names(first) == [MODEL] and names(second) == [MODEL, "tuned"]
            assert second.post(unload, {"lora_name": "tuned"}, headers=boss).status_code == 200
            # one that is away gets it when it comes back
            relay.deaf = True
            assert router.server.fleet is not None
            router.server.fleet.replicas[1].state = "down"
            assert router.post(load, wanted, headers=boss).status_code == 200
            assert names(second) == [MODEL]
            relay.deaf = False
            wait_for(lambda: router.state(1) == "ready")
            assert names(second) == [MODEL, "tuned"]
        relay.close()


def _adapter(model_dir: Path, folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(folder)
    return folder


def test_running_streams_may_end(two: tuple[Live, Live]) -> None:
    answers: list[httpx2.Response] = []
    body = {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "stream": True}

    def ask(router: Routed) -> None:
        answers.append(router.post(CHAT, body))

    for drain_s in (60, 0):
        with routed(two[0].url, drain_s=drain_s) as router:
            thread = threading.Thread(target=ask, args=(router,))
            thread.start()
            wait_for(lambda: two[0].num_answers == 1)
            router.server.stop()
            thread.join()
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert _events(answers[1].text)[-1]["error"]["code"] == "cancelled"
