"""Conformance suites and test tools that third parties run against their own plugins."""
