"""Claims as objects: what the paper and its artifact say, and a verdict on each that code can stand behind."""

from analysis.claims.catalogue import all_claims, evaluate
from analysis.claims.claim import KINDS, Claim, Need, Verdict, judge
from analysis.claims.summary import Tally, summary_text, tally
