//! Hosts, models and helpers of the conformance tests.
