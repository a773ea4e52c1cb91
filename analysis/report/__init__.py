"""The report: a first page with the answers, and a page for every exhibit, section of claims and sweep."""

from analysis.report.page import build
