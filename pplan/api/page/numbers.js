"use strict";
/* Seconds and bytes in words, as pplan's tables have them (cost_models/quantities.py). */
(function (root) {
  /** Three significant digits: `1.23 s`, `45.6 µs`. */
  function formatSeconds(seconds) {
    if (seconds === 0 || !Number.isFinite(seconds)) return `${seconds} s`;
    let number = 0, unit = "s";
    for (const [name, factor] of [["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1]]) {
      unit = name;
      number = Number((seconds / factor).toPrecision(3));
      if (Math.abs(number) < 1000) break;
    }
    if (Math.abs(number) >= 1000) return `${seconds.toFixed(0)} s`;
    const digits = 2 - Math.floor(Math.log10(Math.abs(number)) + 1e-12);
    return `${number.toFixed(Math.max(digits, 0))} ${unit}`;
  }

  /** Binary units: `512 B`, `1.25 GiB`. */
  function formatBytes(size) {
    if (Math.abs(size) < 1024) return `${size.toFixed(0)} B`;
    for (const unit of ["KiB", "MiB", "GiB"]) {
      size /= 1024;
      if (Math.round(Math.abs(size) * 100) / 100 < 1024) return `${size.toFixed(2)} ${unit}`;
    }
    return `${(size / 1024).toFixed(2)} TiB`;
  }

  /** A share: `6.1 %`. */
  const formatPercent = (share) => `${(100 * share).toFixed(1)} %`;

  const api = { formatSeconds, formatBytes, formatPercent };
  if (typeof module !== "undefined" && module.exports) module.exports = api;
  else root.PageNumbers = api;
})(typeof globalThis !== "undefined" ? globalThis : this);
