"""The chat of the web page, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_actions import PHONE, OpenPage, answers, ask, asked, reload, screenshot, until_done
from page_server import NUM_LONG, PageServer, page_server

from image_files import encoded, noise
from outrider.chat.conversation import MediaPart
from patience import wait_until


def test_an_answer_streams_as_markdown(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    screenshot(page, "chat-empty")
    answer = asked(page, "markdown")
    assert answer.locator("h2").inner_text() == "Two planets"
    assert answer.locator("td.align-right").first.inner_text() == "12,742"
    assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    link = answer.locator("a")
    assert (link.get_attribute("target"), link.get_attribute("rel")) == (
        "_blank",
        "noopener noreferrer nofollow",
    )
    answer.get_by_label("Copy code").click()
    wait_until(lambda: page.evaluate("navigator.clipboard.readText()").startswith("def ratio("))
    assert "tokens" in answer.locator(".message-tools").inner_text()
    screenshot(page, "chat")


def test_stop_ends_the_answer_in_the_page_and_on_the_server(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    ask(page, "long")
    page.get_by_text("word3 ").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: site.backend.streams[-1].aborted)
    text = answers(page).last.locator(".markdown").inner_text()
    assert "word3" in text
    assert f"word{NUM_LONG - 1}" not in text
    ask(page, "long")
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    page.keyboard.press("Escape")
    wait_until(lambda: page.get_by_text("Stopped.").count() == 2)


def test_answers_and_questions_have_branches(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    asked(page, "first")
    answers(page).last.get_by_label("Answer again").click()
    page.get_by_text("2 / 2").wait_for()
    until_done(page)
    page.locator(".message.user").get_by_label("Edit and ask again").click()
    page.get_by_label("Edit the message").fill("second")
    page.get_by_role("button", name="Ask again").click()
    page.get_by_text("Answer 1 to: second").wait_for()
    until_done(page)
    page.locator(".message.user").get_by_label("Branch before").click()
    page.get_by_text("Answer 1 to: first").wait_for()
    assert page.get_by_text("Answer 1 to: second").count() == 0
    assert asked(page, "third").inner_text().startswith("Answer 2 to: third")
    sent = [message.text for message in site.backend.requests[-1].messages]
    assert sent == ["first", "Answer 1 to: first", "third"]


def test_a_reload_keeps_the_conversations(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    asked(page, "kept question")
    page.get_by_role("button", name="New conversation").click()
    asked(page, "another question")
    reload(page)
    page.get_by_text("Answer 1 to: another question").wait_for()
    page.get_by_role("button", name="kept question", exact=True).click()
    page.get_by_text("Answer 1 to: kept question").wait_for()
    page.get_by_label("Delete “kept question”").click()
    page.get_by_text("Answer 1 to: another question").wait_for()
    reload(page)
    page.get_by_text("Answer 1 to: another question").wait_for()
    assert page.get_by_text("kept question").count() == 0


def test_a_picture_is_sent(site: PageServer, open_page: OpenPage, tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(encoded(noise()))
    page = open_page(site.url)
    page.get_by_label("Attach a picture").wait_for()
    page.get_by_label("Pictures").set_input_files(picture)
    page.get_by_alt_text("Picture to send").wait_for()
    page.get_by_label("Remove the picture").click()
    assert page.get_by_alt_text("Picture to send").count() == 0
    page.get_by_label("Message", exact=True).evaluate(
        """(input, bytes) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "pasted.png", { type: "image/png" }));
            input.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        list(picture.read_bytes()),
    )
    page.get_by_alt_text("Picture to send").wait_for()
    page.locator(".chat-main").evaluate(
        """(target, bytes) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
            target.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }""",
        list(picture.read_bytes()),
    )
    wait_until(lambda: page.get_by_alt_text("Picture to send").count() == 2)
    asked(page, "what is this?")
    assert page.get_by_alt_text("Attached picture").count() == 2
    parts = site.backend.requests[-1].messages[-1].content
    assert [part.source[:22] for part in parts if isinstance(part, MediaPart)] == [
        "data:image/png;base64,"
    ] * 2


def test_hostile_output_does_nothing(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    answer = asked(page, "hostile")
    assert page.evaluate("window.hacked") is None
    assert answer.locator("img, script, style, svg:not(.icon), [onclick], [onerror]").count() == 0
    assert answer.locator("a[href^=javascript]").count() == 0
    assert "onerror" in answer.inner_text()  # shown as text
    assert page.locator("body").is_visible()
    assert all(url.startswith(site.url) for url in requests)


HOSTILE_FIELD = '"><img src=x onerror="window.hacked=1">\'; ${window.hacked=1} \u202e </textarea>'


def test_hostile_text_in_every_field_does_nothing(site: PageServer, open_page: OpenPage) -> None:
    page, hostile = open_page(site.url), HOSTILE_FIELD
    page.get_by_label("Settings of this conversation").click()
    for field in page.locator(".drawer textarea").all():
        field.fill(hostile)
    asked(page, hostile)
    page.get_by_text("JSON schema: ").first.wait_for()  # neither schema nor tools are JSON
    for name in ("JSON schema of the answer", "Tools"):
        page.get_by_label(name).fill("")
    for field in page.locator(".drawer input[type=number]").all():
        field.evaluate("(input) => { input.value = '1e999'; input.dispatchEvent(new Event('change')); }")
    assert asked(page, hostile).inner_text().startswith("Answer 2 to: ")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    request = site.backend.requests[-1]
    assert (request.messages[0].role, request.messages[0].text) == ("system", hostile)


def test_hostile_text_in_edits_and_results_does_nothing(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    asked(page, "call")
    for name in ("weather", "time"):
        page.get_by_label(f"Result of {name}").fill(HOSTILE_FIELD)
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("The tool said: ").wait_for()
    until_done(page)
    assert site.backend.requests[-1].messages[-1].text == HOSTILE_FIELD
    page.locator(".message.user").get_by_label("Edit and ask again").click()
    page.get_by_label("Edit the message").fill(HOSTILE_FIELD)
    page.get_by_role("button", name="Ask again").click()
    page.get_by_text("Answer 1 to: ").wait_for()
    until_done(page)
    assert site.backend.requests[-1].messages[-1].text == HOSTILE_FIELD
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_a_key_that_cannot_be_sent_is_asked_for_again(
    open_page: OpenPage, errors: list[str], browser: Any
) -> None:
    with page_server(api_key="right") as site:
        page = open_page(site.url)
        for key in (HOSTILE_FIELD, "clé €", "right"):
            page.get_by_label("API key", exact=True).fill(key)
            page.keyboard.press("Enter")
            if key != "right":
                page.get_by_text("characters that cannot be sent").wait_for()
        page.get_by_text("tiny is ready.").wait_for()
        assert page.evaluate("window.hacked") is None
        page.close()
    assert all("401" in error for error in errors)
    errors.clear()


def test_settings_are_sent_and_copied(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("System prompt").fill("It's short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("77")
    page.get_by_label("Draft depth").select_option("3")
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    asked(page, "hello")
    params = site.backend.requests[-1].params
    assert (params.temperature, params.max_tokens, params.draft_depth) == (0.5, 77, 3)
    grammar = site.backend.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {"type": "object"}
    screenshot(page, "settings")
    page.get_by_label("Copy as curl").click()
    wait_until(lambda: page.evaluate("navigator.clipboard.readText()").startswith("curl "))
    curl = page.evaluate("navigator.clipboard.readText()")
    body = json.loads(re.search(r"-d '(.*)'$", curl, re.DOTALL)[1].replace("'\\''", "'"))  # type: ignore[index]
    assert body["messages"][0] == {"role": "system", "content": "It's short."}
    assert body["draft_depth"] == 3
    page.get_by_label("Copy as Python").click()
    wait_until(lambda: page.evaluate("navigator.clipboard.readText()").startswith("import os"))
    code = page.evaluate("navigator.clipboard.readText()")
    compile(code, "copied", "exec")
    assert "'draft_depth': 3" in code.replace('"', "'")


def test_thoughts_are_folded_and_calls_are_shown_and_answered(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    answer = asked(page, "think")
    thoughts = answer.locator("details.reasoning")
    assert thoughts.get_attribute("open") is None
    thoughts.locator("summary").click()
    assert "Hmm." in thoughts.inner_text()
    answer = asked(page, "call")
    assert '"city": "Oslo"' in answer.locator(".call").first.inner_text()
    page.get_by_label("Result of weather").fill("rain")
    page.get_by_label("Result of time").fill("noon")
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("The tool said: noon").wait_for()
    assert [message.role for message in site.backend.requests[-1].messages[-3:]] == [
        "assistant",
        "tool",
        "tool",
    ]
    until_done(page)


def test_tokens_are_coloured_by_origin(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("Show how each token was won").check()
    answer = asked(page, "count")
    tokens = answer.locator(".token-text .token")
    assert tokens.count() == 7
    colours = {tokens.nth(i).evaluate("(span) => getComputedStyle(span).backgroundColor") for i in range(7)}
    assert len(colours) == 7
    tokens.nth(2).hover()
    detail = answer.locator(".token-detail")
    assert detail.inner_text() == '"c" · draft of the MTP head or draft model · place 2 · probability 74.1 %'
    screenshot(page, "tokens")
    answer.get_by_label("Show how each token was won").click()
    assert answer.locator(".markdown").inner_text() == "abcdefg"


def test_a_wrong_key_is_asked_for_again(open_page: OpenPage, errors: list[str], browser: Any) -> None:
    with page_server(api_key="right") as site:
        page = open_page(site.url)
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        for key in ("wrong", "right"):
            page.get_by_label("API key", exact=True).fill(key)
            page.keyboard.press("Enter")
            if key == "wrong":
                dialog.get_by_text("the API key is missing or wrong").wait_for()
        dialog.wait_for(state="hidden")
        page.get_by_text("tiny is ready.").wait_for()
        assert asked(page, "hello").inner_text().startswith("Answer 1 to: hello")
        assert page.evaluate("localStorage.getItem('outrider-api-key')") is None
        reload(page)
        page.get_by_text("Answer 1 to: hello").wait_for()  # the key is kept for the session
        page.get_by_text("tokens/s").first.wait_for()
        assert not dialog.is_visible()
        page.close()
    assert all("401" in error for error in errors)  # the browser's own line for each refused request
    errors.clear()


def test_a_restart_in_the_middle_of_an_answer(open_page: OpenPage, errors: list[str], browser: Any) -> None:
    with page_server() as site:
        page = open_page(site.url)
        ask(page, "long")
        page.get_by_text("word3 ").wait_for()
        site.stop()
        answers(page).last.get_by_text("The connection to the server was lost.").wait_for()
        assert "word3" in answers(page).last.inner_text()
        site.start()
        until_done(page)
        page.locator("#rate:not(.lost)", has_text="tokens/s").wait_for()
        assert asked(page, "back?").inner_text().startswith("Answer 2 to: back?")
        page.close()
    errors.clear()  # the browser's own lines for the connections that were lost


def test_the_keyboard_is_enough(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url)
    page.locator("body").click(position={"x": 640, "y": 600})
    page.keyboard.press("/")
    page.keyboard.type("typed")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("in two lines")
    page.keyboard.press("Enter")
    page.get_by_text("Answer 1 to: typed").wait_for()
    until_done(page)
    page.keyboard.press("ArrowUp")
    page.get_by_label("Edit the message").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+n")
    page.get_by_text("What would you like to know?").wait_for()
    page.keyboard.press("Alt+2")
    page.get_by_role("heading", name="Live batch").wait_for()


def test_on_a_phone(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(site.url, **PHONE)
    screenshot(page, "phone-empty")
    asked(page, "markdown")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    screenshot(page, "phone")
    assert not page.get_by_role("button", name="New conversation").is_visible()
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_text("What would you like to know?").wait_for()
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("System prompt").wait_for()
    screenshot(page, "phone-settings")
    page.get_by_label("Close the settings").click()
    for view in ("#live", "#model"):
        page.goto(f"{site.url}{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(
    site: PageServer, open_page: OpenPage, scheme: Any
) -> None:
    page = open_page(site.url, color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    assert (first == "rgb(255, 255, 255)") is (scheme == "light")
    asked(page, "markdown")
    screenshot(page, f"chat-{scheme}")
    page.get_by_label("Switch between light and dark").click()
    second = page.evaluate(background)
    assert second != first
    page.reload()
    assert page.evaluate(background) == second


def test_the_description_of_the_api(site: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{site.url}docs")
    operation = page.locator("details", has_text="/v1/chat/completions").first
    operation.locator("summary").click()
    assert "return_token_origins" in operation.inner_text()
    screenshot(page, "docs")
