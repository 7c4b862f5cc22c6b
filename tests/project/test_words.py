"""The lint of words finds each discouraged word, and the package and the pages have none."""

from loaded_files import tool

words = tool("words")


def found(text):
    return [(f.line, f.word.lower()) for f in words.find_words("page.md", words.prose(text))]


def test_a_discouraged_word_is_found_with_its_line_and_not_within_another():
    assert found("Rows are dealt\nto sites.") == [(1, "dealt")]
    assert found("An ideal dealer.\n\nIt goes\non.") == [(3, "goes\non")]


def test_code_is_not_checked():
    assert found("Call `deal` or ``beside``.\n\n```text\nanew\n```\n\nThen mend it.") == [
        (7, "mend")
    ]


def test_every_discouraged_word_has_a_word_to_use_instead():
    assert all(instead for _, instead in words.WORDS)
    for _, instead in words.WORDS:
        assert found(instead) == [], f"{instead} is discouraged too"


def test_strings_and_docstrings_are_checked():
    source = '"""Deal rows."""\nhint = f"{count} rows are asked for."\n'
    texts = [(line, text) for line, text in words.literals(source)]
    assert texts == [(1, "Deal rows."), (2, " rows are asked for.")]


def test_sentences_are_counted_without_headings_tables_and_code():
    page = "# A heading of five words\n\nOne two three. Four `five six` seven\neight.\n\n| a | b c d |\n"
    assert words.sentence_lengths(page) == [3, 4]
