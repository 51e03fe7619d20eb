"""Sizes, rates and durations: what is read, what is refused and with which words, what is printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import UsageError
from pplan.cost_models.quantities import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 17_179_869_184),
        ("16 GB", 16_000_000_000),
        (" 1.5gib ", 1_610_612_736),
        ("512B", 512),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("3KiB", 3_072),
        ("1e3MB", 1_000_000_000),
        ("2MiB", 2_097_152),
        ("1TB", 10**12),
        ("1TiB", 1_099_511_627_776),
        (".5kB", 500),
    ],
)
def test_sizes(text: str, size: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == size
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16", "the unit is missing"),
        ("16G", "'G'"),
        ("16Gbit", "'Gbit'"),
        ("lots", "not a size"),
        ("", "not a size"),
        ("nan GB", "not a size"),
        ("inf", "not a size"),
        ("-1GiB", "must not be negative"),
        ("0GiB", "at least one byte"),
        ("0.1B", "at least one byte"),
        ("1e400GB", "too large"),
        ("1GiB 2GiB", "not a size"),
    ],
)
def test_refused_sizes(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes(text, "memory")
    assert refused.value.what.startswith("memory ")
    assert text in refused.value.what
    assert words in refused.value.what
    assert "16GiB" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("300GB/s", 300e9),
        ("25 GB/s", 25e9),
        ("15.75GBps", 15.75e9),
        ("1GiB/s", 2.0**30),
        ("800MB/s", 800e6),
        ("5B/s", 5.0),
        ("2TB/s", 2e12),
        ("inf", math.inf),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["100Gb/s", "100Gbit/s", "100Gbps", "100 Gbits/s", "100gbps", "100gb/s"])
def test_bits_are_refused_with_their_bytes(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_rate(text, "bandwidth")
    assert "bytes, not bits" in refused.value.what
    assert f"bandwidth {text}" in refused.value.what
    assert "12.5GB/s" in refused.value.hint


@pytest.mark.parametrize(
    "text", ["0GB/s", "-1GB/s", "nan", "25", "25GB", "25i/s", "25iB/s", "fast", "-inf", "1e999GB/s"]
)
def test_refused_rates(text: str) -> None:
    with pytest.raises(UsageError, match=r"^bandwidth") as refused:
        parse_rate(text, "bandwidth")
    assert text in refused.value.what
    assert "25GB/s" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5us", 5e-6),
        ("20 µs", 20e-6),
        ("20\u03bcs", 20e-6),
        ("60s", 60.0),
        ("1.5ms", 1.5e-3),
        ("2m", 120.0),
        ("2min", 120.0),
        ("100ns", 100e-9),
        ("1h", 3600.0),
        ("0", 0.0),
        ("0us", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


def test_times_are_in_seconds_without_a_unit() -> None:
    texts = ("20", " 2.5 ", "20s", "2min", "500ms", "0")
    assert [parse_time(text) for text in texts] == [20.0, 2.5, 20.0, 120.0, 0.5, 0.0]
    for text in ("soon", "-1", "", "inf", "5 weeks"):
        with pytest.raises(UsageError, match=r"^budget"):
            parse_time(text, "budget")


@pytest.mark.parametrize("text", ["5", "-1s", "nan", "inf", "soon", "5 weeks", "1e999s", "5MS"])
def test_refused_durations(text: str) -> None:
    with pytest.raises(UsageError, match=r"^budget") as refused:
        parse_seconds(text, "budget")
    assert text in refused.value.what
    assert "60s" in refused.value.hint


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.25 * 2**30, "1.25 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (5000 * 2**40, "5000.00 TiB"),
        (-1.5 * 2**20, "-1.50 MiB"),
    ],
)
def test_printed_sizes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (45.6e-6, "45.6 µs"),
        (0.9999e-3, "1.00 ms"),
        (0.99951, "1.00 s"),
        (123.4, "123 s"),
        (1234.4, "1234 s"),
        (5e-6, "5.00 µs"),
        (3e-9, "3.00 ns"),
        (-0.0123, "-12.3 ms"),
        (math.inf, "inf s"),
    ],
)
def test_printed_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_short_durations_drop_closing_zeros_only() -> None:
    assert [format_seconds(s, short=True) for s in (5e-6, 20e-6, 100e-6, 1.5e-3, 10)] == [
        "5 µs",
        "20 µs",
        "100 µs",
        "1.5 ms",
        "10 s",
    ]


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (300e9, "300 GB/s"),
        (15.75e9, "15.75 GB/s"),
        (1.2e12, "1.2 TB/s"),
        (5.0, "5 B/s"),
        (math.inf, "unlimited"),
    ],
)
def test_printed_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@settings(deadline=None)
@given(st.integers(1, 2**60))
def test_a_printed_size_reads_back_to_what_it_shows(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005)


@settings(deadline=None)
@given(st.floats(1e-9, 999.0))
def test_a_printed_duration_reads_back_to_what_it_shows(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.005)
