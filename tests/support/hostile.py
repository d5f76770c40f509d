"""What somebody may write who wants a page, a terminal, a scraper or a log to do something else than show it.

Every text has MARK in it, so that whoever looks for harm can tell that the text has come at all. The texts travel as
fields of custom resources (as JSON, lone surrogates included) and as the last words of an engine (as bytes).
"""

from __future__ import annotations

MARK = "Hz7"
FORGED = "forged"
"""Begins a line, names a metric, or is a key of JSON only if something was not escaped."""

TEXTS = {
    "markup": f"{MARK}<script>window.{FORGED}=1</script>\"'><img src=x onerror=window.{FORGED}=1></td></main></style>"
    "<!--{{7*7}}{% raw %}&lt;b&gt;<a href=javascript:alert(1)>",
    "labels": f'{MARK}a"b\\c",evil="1"}} 1\n# TYPE {FORGED} counter\n{FORGED} 1\n',
    "json": f'{MARK}"}},{{"{FORGED}":true}}],"x":"\\u0000\\',
    "colours": f"{MARK}\x1b[31m\x1b[2J\x1b[1;1H\x1b[0m\r\x08\x7f\x05",
    "commands": f"{MARK}\x1b]0;title\x07\x1b]52;c;QQ==\x1b\\\x9b31m\x9d0;title\x9c\x90q\x1bP",
    "directions": f"{MARK}\u202egnp.exe\u2066\u2069\u200f\u061c\u200b\ufeff",
    "lines": f"{MARK}\u2028{FORGED}\u2029{FORGED}\x85{FORGED}\x0b{FORGED}\x0c{FORGED}\r\n{FORGED}: a line\r{FORGED}",
    "formats": f"{MARK} %s %d %n %(asctime)s %(here)s {{0}} {{name!r:>99999999}} $HOME `id` %%",
    "nul": f"{MARK}\x00after\x01",
    "surrogates": f"{MARK}\udcff\ud83d \U000e0041\ufffe",
    "blanks": f" {MARK}\u00a0\u3000\t ",
    "long": f"{MARK}{'m' * 100_000}{MARK}",
}


def as_bytes(text: str) -> bytes:
    """The text as an engine may write it: what is no text at all comes as the bytes that it stands for."""
    return text.encode("utf-8", "surrogatepass")


LONGEST = 900
"""Characters of a text in a label: conf/prometheus has a limit of 1000, beyond which a whole scrape is refused."""


def engine_metrics() -> str:
    """A page of an engine, well-formed, with every text as a label's value and as the help of a metric."""
    lines = []
    for kind, text in TEXTS.items():
        escaped = text[:LONGEST].replace("\\", "\\\\").replace("\n", "\\n").replace("\r", " ")
        lines.append(f"# HELP own_{kind} {escaped}\n# TYPE own_{kind} gauge\nown_{kind} 1\n")
        quoted = escaped.replace('"', '\\"')
        lines.append(f'own_words{{kind="{kind}",text="{quoted}"}} 1\n')
    return "# HELP own_words Words\n# TYPE own_words gauge\n" + "".join(lines)


def typeable(text: str) -> bool:
    """Whether it can be an argument of a command."""
    return "\0" not in text and not any(0xD800 <= ord(char) < 0xE000 for char in text)


def strange(text: str) -> list[str]:
    """What in a shown text could do more than be seen, apart from ends of lines."""
    return sorted({char for char in text if not char.isprintable() and char != "\n"})


def forged(text: str) -> list[str]:
    """Lines that nobody of ours can have written."""
    return [line[:200] for line in text.split("\n") if line.lstrip().startswith(FORGED)]
