"""The report: one self-contained HTML page with every exhibit, claim and record."""

from analysis.report.page import build
