"""Any order of adds, steps, aborts, preemptions, swaps and peer events keeps the KV right."""

from hypothesis import settings
from support.scheduler_machine import SchedulerMachine

SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
