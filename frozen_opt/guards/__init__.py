"""What guards a run once it has started: checks at each step, at each checkpoint, and when it resumes."""

from frozen_opt.guards.fingerprint import take_fingerprint
from frozen_opt.guards.resume import check_resume, report_state
from frozen_opt.guards.verify import verify

__all__ = ["check_resume", "report_state", "take_fingerprint", "verify"]
