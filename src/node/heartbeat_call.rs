//! Heartbeat API calls: own request class, and a deadline sent to the server. Pure.
//!
//! Implements spec 10 §2.1.

use std::time::Duration;

use berth_api::api::{Call, RequestClass};
use berth_types::go_duration::GoDuration;

/// Deadline of heartbeats: the smaller of status update frequency and lease duration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HeartbeatDeadline(pub(super) Duration);

impl HeartbeatDeadline {
    /// Marks a call as heartbeat, with the full deadline.
    pub(super) fn heartbeat(self, call: Call) -> Call {
        self.within(call, self.0)
    }

    /// Maximum duration of a step that makes two requests.
    pub(super) fn step_limit(self) -> Duration {
        self.0.saturating_mul(2)
    }

    /// Marks a call as heartbeat with a shorter local timeout; the server gets the full deadline.
    pub(super) fn within(self, call: Call, deadline: Duration) -> Call {
        call.on(RequestClass::Heartbeat)
            .query("timeout", GoDuration::from(self.0).to_string())
            .within(deadline.min(self.0))
    }
}
