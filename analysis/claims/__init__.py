"""Claims as objects: what the paper and its artifact say, and a verdict on each that code can stand behind."""

from analysis.claims.catalogue import all_claims, evaluate, summary_text, tally
from analysis.claims.claim import KINDS, Claim, Need, Verdict, judge
