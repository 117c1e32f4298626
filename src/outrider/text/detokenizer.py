"""Owns the text of one answer while it grows: token ids in, whole characters out.

Must not know which tokenizer it serves: it sees a decode function and judges by the text that comes back.

    ids pushed so far    . . . . . . . . [ settled ids | unsettled ids ]    the window, all that is decoded
    its text                             [ shown             |  held   ]    held: U+FFFD, a few tokens long

The shown part is context. It lets decoders that treat their first token apart (SentencePiece drops a leading
space, WordPiece writes none) see that the next token is not the first.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

TORN = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character

MAX_CHARACTER_BYTES = 4

# A torn character lacks one byte at least, so it has begun in the last 3 tokens and is 3 U+FFFD at most.
MAX_HELD = MAX_CHARACTER_BYTES - 1

# Each held U+FFFD stands for at most MAX_HELD tokens; one more token is context for them.
NUM_KEPT = MAX_HELD * MAX_HELD + 1

TRIM_AT = 24  # tokens in the window
FORCE_TRIM_AT = 2 * TRIM_AT


class Detokenizer:
    """Turns token ids into text one at a time; each character is returned once, when it is final.

    The pieces join up to `decode(all ids)` if decode only ever extends its text, but for U+FFFD at its end.
    Where decode rewrites text already returned (space clean-up; a byte-fallback run spoilt by a bad byte),
    that text stands, and the tokens after it are decoded on their own. Pass a decode without space clean-up.

    With `prompt_ids` the text is what follows the prompt, its leading space included; without, the answer
    stands alone. A character torn between prompt and answer stays torn.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._silent: dict[int, bool] = {}
        self._window = self._context(prompt_ids)
        self._text = decode(self._window) if self._window else ""  # the text of the window
        self._shown = self._text  # a prefix of the text, unless decode has rewritten it
        self._num_settled = len(self._window)  # tokens in the window up to when last nothing was held

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that has become final, often one word, sometimes none."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._is_silent(token_id):
            return ""
        # Byte fallback writes one U+FFFD for each byte of a torn character: fewer means that it is whole now.
        is_whole = len(text) < len(self._text)
        self._window.append(token_id)
        self._text = text
        if self._is_rewritten():
            if self._may_recover():
                return ""
            self._drop_context()
        new_text = self._show(num_held=0 if is_whole else self._num_torn())
        if len(self._window) >= TRIM_AT:
            new_text += self._trim()
        return new_text

    def flush(self) -> str:
        """Return what is still held, torn or not: the answer is over."""
        if self._is_rewritten():
            self._drop_context()
        return self._show(num_held=0)

    def _show(self, num_held: int) -> str:
        new_text = self._text[len(self._shown) : len(self._text) - num_held]
        self._shown += new_text
        if num_held == 0:
            self._num_settled = len(self._window)
        return new_text

    def _is_rewritten(self) -> bool:
        return not self._text.startswith(self._shown)

    def _may_recover(self) -> bool:
        """Byte fallback writes a whole run of bytes as U+FFFD while its last character is torn."""
        return self._text.endswith(TORN) and self._is_fresh()

    def _num_torn(self) -> int:
        """How many U+FFFD at the end may still turn into something else."""
        num_trailing = len(self._text) - len(self._text.rstrip(TORN))
        return num_trailing if self._is_fresh() else min(num_trailing, MAX_HELD)

    def _is_fresh(self) -> bool:
        """Whether all unsettled tokens may belong to one character."""
        return len(self._window) - self._num_settled <= MAX_HELD

    def _drop_context(self) -> None:
        self._window = self._window[self._num_settled :]
        self._text = self._decode(self._window)
        self._shown = ""
        self._num_settled = 0

    def _trim(self) -> str:
        """Shorten the window, best at the start of a character; return text that can be held no longer."""
        held = self._text[len(self._shown) :]
        for num_kept in range(NUM_KEPT, NUM_KEPT + MAX_CHARACTER_BYTES):
            text = self._decode(self._window[-num_kept:])
            if text.endswith(held) and _starts_whole(text, num_kept):
                self._keep(num_kept, text, held)
                return ""
        if len(self._window) < FORCE_TRIM_AT:
            return ""
        return self._force_trim(held)

    def _force_trim(self, held: str) -> str:
        """Cut inside a character: there is none to cut before, or each token ends in the middle of one.

        UTF-8 finds its step again after the cut, so the end of the text stays as it was. Only a spoilt
        byte-fallback run may read differently now; then what was held is final.
        """
        text = self._decode(self._window[-NUM_KEPT:])
        if text.endswith(held):
            self._keep(NUM_KEPT, text, held)
            return ""
        self._keep(NUM_KEPT, text, held="")
        return held

    def _keep(self, num_kept: int, text: str, held: str) -> None:
        num_dropped = len(self._window) - num_kept
        self._window = self._window[-num_kept:]
        self._text = text
        self._shown = text[: len(text) - len(held)]
        self._num_settled = max(0, self._num_settled - num_dropped)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The fewest of the prompt's last tokens that start with a whole character."""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._is_silent(token_id):
                continue
            context.insert(0, token_id)
            if len(context) == MAX_CHARACTER_BYTES or _starts_whole(self._decode(context), len(context)):
                break
        return context

    def _is_silent(self, token_id: int) -> bool:
        """Whether decode skips the token altogether, as it does special ones.

        Asked twice over, because a first token may be empty only for being first ("▁").
        """
        if token_id not in self._silent:
            self._silent[token_id] = self._decode([token_id, token_id]) == ""
        return self._silent[token_id]


def _starts_whole(text: str, num_tokens: int) -> bool:
    """Whether the tokens start at a character: torn ones start with U+FFFD and bring at least one each."""
    return not text.startswith(TORN) or len(text) < num_tokens
