"""Claims: statements of the paper, its artifact and ours as objects, with verdicts computed from records."""

from analysis.claims.catalogue import all_claims, evaluate, summary_text, tally
from analysis.claims.claim import KINDS, Claim, Need, Verdict, judge
