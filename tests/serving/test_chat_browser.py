"""The chat page in a real browser: what a person does with it, and what is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import XSS, Browser, Script, running_app
from fixtures import TEMPLATES_DIR
from live_server import Live, wait_for

from swift.serving.chat_page import make_page

LAST = "document.querySelector('#messages').lastElementChild"
STATUS = "document.querySelector('#status').textContent"
INPUT = "document.querySelector('#input').value"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def address(script: Script) -> Iterator[str]:
    with running_app(script.app) as endpoint:
        start = {"temperature": 0.3, "system": "Be short.", "stop": ["END", "FIN"]}
        with running_app(make_page(f"{endpoint}/v1", "k", title="Test", start=start, local_only=True)) as page:
            yield page


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Browser]:
    """The page with nothing kept from before."""
    browser.size(1000, 800)
    browser.goto(address)
    browser.js("localStorage.clear()")
    browser.goto(address)
    browser.faults.clear()
    yield browser
    assert browser.faults == []


def test_a_question_is_sent_and_the_answer_streams(page: Browser, script: Script) -> None:
    page.js("document.querySelector('#input').focus()")
    page.type("hello")
    page.key("Enter", shift=True)
    page.type("there")
    assert page.js(INPUT) == "hello\nthere"
    page.key("Enter")
    page.idle()
    assert page.js(f"{LAST}.querySelector('.body').innerText").strip() == "You said: hello\nthere"
    assert "tokens" in page.js(STATUS) and page.js(INPUT) == ""
    asked = script.asked[-1]
    assert asked["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello\nthere"},
    ]
    assert (asked["temperature"], asked["stop"], asked["model"]) == (0.3, ["END", "FIN"], "scripted")
    assert "top_p" not in asked and "seed" not in asked


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_an_answer_is_stopped_at_the_endpoint_too(page: Browser, script: Script, way: str) -> None:
    before = script.left
    page.ask("slow")
    page.wait(f"{LAST}?.textContent.includes('word5')")
    if way == "button":
        page.click("#stop")
    else:
        page.key("Escape")
    page.idle()
    assert page.js(STATUS) == "Stopped."
    wait_for(lambda: script.left == before + 1)
    assert "word5" in page.js(f"{LAST}.textContent")  # what came stays


def test_editing_and_asking_again_make_branches(page: Browser, script: Script) -> None:
    page.ask("first")
    page.idle()
    page.click("article.user .tools button", text="Edit")
    assert page.js(INPUT) == "first"
    page.type(" changed")
    page.key("Enter")
    page.idle()
    assert script.asked[-1]["messages"][-1]["content"].split() == ["first", "changed"]
    page.click("article.assistant .tools button", text="Again")
    page.idle()
    assert page.js("document.querySelector('#talk').options.length") == 3
    page.js("{ const t = document.querySelector('#talk'); t.selectedIndex = 2; t.onchange(); }")
    assert page.js(f"{LAST}.querySelector('.body').innerText") == "You said: first"


def test_thoughts_stay_as_the_reader_left_them(page: Browser) -> None:
    page.ask("thoughts")
    page.wait(f"!!{LAST}?.querySelector('details.thought')")
    assert not page.js(f"{LAST}.querySelector('details').open")
    page.click("details.thought summary")
    page.wait(f"{LAST}?.textContent.includes('thinking 30')")
    assert page.js(f"{LAST}.querySelector('details').open")
    page.idle()
    assert page.js(f"{LAST}.querySelector('details').open")
    assert page.js(f"{LAST}.querySelector('.body').innerText").startswith("done 0")
    assert page.js(STATUS).startswith("60 tokens, ") and page.js(STATUS).endswith(" tokens/s")


def test_what_is_spoken_is_the_whole_answer_once(page: Browser) -> None:
    page.js(
        "{ window.spoken = []; const node = document.querySelector('#spoken');"
        "new MutationObserver(() => spoken.push(node.textContent))"
        ".observe(node, {childList: true, characterData: true, subtree: true}); }"
    )
    page.ask("hello")
    page.idle()
    assert page.js("document.querySelectorAll('[aria-live], [role=log], [role=status]').length") == 1
    page.wait("spoken.length")
    assert page.js("spoken") == ["You said: hello"]


def test_a_tool_call_is_shown(page: Browser) -> None:
    page.ask("tool")
    page.idle()
    assert page.js(f"{LAST}.querySelector('details.call').innerText").split("\n", 1)[0] == "Tool call: weather"
    assert '{"city": "Rome"}' in page.js(f"{LAST}.innerText")


@pytest.mark.parametrize(
    ("word", "said"),
    [("busy", "busy; try again in a moment. (7 s)"), ("toolong", "9000 tokens"), ("key", "--api_key"),
     ("html", "Bad gateway"), ("broken", "broke off")],
)  # fmt: skip
def test_errors_are_said_and_the_question_can_be_asked_again(page: Browser, word: str, said: str) -> None:
    page.ask(word)
    page.wait("document.querySelector('#status').className === 'error'")
    assert said in page.js(STATUS)
    page.click(".tools button", text="Again")
    page.wait("document.querySelector('#status').className === 'error'")
    assert page.js(f"{LAST}.className") == ("assistant" if word == "broken" else "user")


def test_a_model_can_put_no_code_into_the_page(page: Browser) -> None:
    page.ask("xss")
    page.idle()
    assert (
        page.js("document.querySelectorAll('#messages script, #messages img, #messages svg, #messages b').length") == 0
    )
    links = page.js("[...document.querySelectorAll('#messages a')].map(a => a.href)")
    assert all(link.startswith("https://example.com/") for link in links)
    page.js("document.querySelectorAll('#messages *').forEach(e => e.dispatchEvent(new MouseEvent('mouseover')))")
    page.js("window.hit = window.hit ?? 0")
    assert page.js("window.hit") == 0
    # the same from a reader's own message, an imported file and the storage
    page.ask(XSS)
    page.idle()
    page.call("Page.reload")
    page.wait("document.querySelectorAll('article').length === 4")
    assert page.js("window.hit ?? 0") == 0
    assert "<script>window.hit=1</script>" in page.js("document.querySelector('#messages').innerText")


def test_markdown_comes_out_as_if_it_had_come_at_once(page: Browser) -> None:
    page.ask("markdown")
    page.idle()
    streamed = page.js(f"{LAST}.querySelector('.body').innerHTML")
    page.call("Page.reload")
    page.wait("document.querySelectorAll('article').length === 2")
    assert page.js(f"{LAST}.querySelector('.body').innerHTML") == streamed
    for part in ("<h2>Plan</h2>", "<strong>bold</strong>", "<em>slanted</em>", "<li>two<ul><li>deeper</li></ul></li>",
                 "<ol start=\"1\"><li>first</li><li>second</li></ol>", "<blockquote>quoted</blockquote>",
                 "return x &lt; 3", "<th>a</th>", "<td>2</td>", "<p>The end.</p>"):  # fmt: skip
        assert part in streamed, part


def test_a_long_answer_is_drawn_line_by_line(page: Browser) -> None:
    page.js("window.added = 0; new MutationObserver(all => { for (const one of all) added += one.addedNodes.length; })"
            ".observe(document.querySelector('#messages'), {childList: true, subtree: true})")  # fmt: skip
    page.ask("huge")
    page.idle()
    assert page.js(f"{LAST}.querySelectorAll('p').length") == 3000
    assert page.js("added") < 3 * 3000  # drawing all anew for each chunk would be millions
    page.wait("(e => e.scrollHeight - e.scrollTop - e.clientHeight < 5)(document.querySelector('#scroll'))")


def test_conversations_outlive_a_reload(page: Browser) -> None:
    page.ask("hello")
    page.idle()
    page.click(".tools button", text="Good")
    page.call("Page.reload")
    page.wait("document.querySelectorAll('article').length === 2")
    assert page.js("document.querySelector('[aria-pressed=true]').textContent") == "Good"


def test_export_and_import(page: Browser, tmp_path: Path) -> None:
    page.ask("hello")
    page.idle()
    page.click(".tools button", text="Bad")
    page.click("#settings > summary")
    rows = []
    for name, file in (("#export", "conversations.jsonl"), ("#votes", "ratings.jsonl")):
        path = page.downloads / file
        path.unlink(missing_ok=True)
        page.click(name)
        wait_for(lambda path=path: path.exists() and path.read_text().endswith("\n"))
        rows.append(json.loads(path.read_text()))
    assert [m["role"] for m in rows[0]["messages"]] == ["system", "user", "assistant"]
    assert rows[1] == {**rows[0], "label": False}
    page.js("localStorage.clear()")
    page.call("Page.reload")
    page.wait("document.querySelectorAll('#talk option').length === 1")
    node = page.call("DOM.getDocument")["root"]["nodeId"]
    file_input = page.call("DOM.querySelector", nodeId=node, selector="#import")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=file_input, files=[str(page.downloads / "ratings.jsonl")])
    page.wait("document.querySelectorAll('article').length === 2")
    assert page.js("document.querySelector('[aria-pressed=true]').textContent") == "Bad"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"messages": 3}\n')
    page.call("DOM.setFileInputFiles", nodeId=file_input, files=[str(bad)])
    page.wait("document.querySelector('#status').className === 'error'")
    assert page.js(STATUS).endswith("line 2")


@pytest.mark.slow
def test_exported_rows_train(page: Browser, tiny_model_dir: Path, tmp_path: Path) -> None:
    for word, vote in (("hello", "Good"), ("thoughts", "Bad"), ("tool", "Good"), ("plain", "Bad")):
        page.ask(word)
        page.idle()
        page.click("article.assistant .tools button", text=vote)
        if word == "tool":  # one that ends in a call
            page.click("#fresh")
    page.ask("busy")  # and one that ends in a question
    page.idle()
    page.click("#settings > summary")
    for name, file in (("#export", "conversations.jsonl"), ("#votes", "ratings.jsonl")):
        path = page.downloads / file
        path.unlink(missing_ok=True)
        page.click(name)
        wait_for(lambda path=path: path.exists() and path.read_text().endswith("\n"))
    rows = [json.loads(line) for line in (page.downloads / "conversations.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["role"] for row in rows] == ["assistant", "assistant"]
    assert rows[0]["messages"][-1]["tool_calls"][0]["function"]["name"] == "weather"
    assert not any("reasoning_content" in message for row in rows for message in row["messages"])

    def swift(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "swift.cli", *words],
            capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    talks, ratings = str(page.downloads / "conversations.jsonl"), str(page.downloads / "ratings.jsonl")
    model = ["--model", str(tiny_model_dir), "--template", str(TEMPLATES_DIR / "qwen2_5.jinja")]  # it shows calls
    few = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--split_dataset_ratio", "0"]
    swift("data", "check", talks, *model)
    swift("sft", *model, "--dataset", talks, *few, "--output_dir", str(tmp_path / "sft"))
    swift("rlhf", "--rlhf_type", "kto", *model, "--dataset", ratings, *few, "--output_dir", str(tmp_path / "kto"))


@pytest.mark.parametrize("width", [360, 1000])
def test_nothing_is_wider_than_the_window(page: Browser, width: int) -> None:
    page.size(width, 700)
    for word in ("markdown", "x" * 300):
        page.ask(word)
        page.idle()
    page.click("#settings > summary")
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth")
    assert page.js("document.querySelector('#send').getBoundingClientRect().bottom") <= 700


def test_a_page_in_chinese(browser: Browser, script: Script) -> None:
    with running_app(script.app) as endpoint, running_app(make_page(f"{endpoint}/v1", None, lang="zh")) as address:
        browser.goto(address)
        words = browser.js("document.body.innerText")
        assert "新建" in words and "发送" in words and "Send" not in words
        assert browser.js("document.documentElement.lang") == "zh"


def test_who_leaves_the_page_leaves_the_engine(browser: Browser, live: Live) -> None:
    with running_app(make_page(f"{live.url}/v1", None, start={"max_tokens": 900, "temperature": 1.0})) as address:
        browser.goto(address)
        browser.ask("Tell me a story.")
        wait_for(lambda: live.backend.stats().num_running > 0)
        browser.call("Page.navigate", url="about:blank")
        wait_for(live.idle)
