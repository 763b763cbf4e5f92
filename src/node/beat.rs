//! Heartbeat API calls: own request class, and a deadline sent to the server. Pure.
//!
//! Implements spec 10 §2.1.

use std::time::Duration;

use berth_api::api::{Call, Line};

/// Deadline of heartbeats: the smaller of status update frequency and lease duration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Beat(pub(super) Duration);

impl Beat {
    /// Marks a call as heartbeat, with the full deadline.
    pub(super) fn on(self, call: Call) -> Call {
        self.within(call, self.0)
    }

    /// Maximum duration of a step that makes two requests.
    pub(super) fn step(self) -> Duration {
        self.0.saturating_mul(2)
    }

    /// Marks a call as heartbeat with a shorter local timeout; the server gets the full deadline.
    pub(super) fn within(self, call: Call, deadline: Duration) -> Call {
        call.on(Line::Heartbeat).query("timeout", text(self.0)).within(deadline.min(self.0))
    }
}

/// Formats a duration as Go does: `10s`, `1m30s`, `500ms`.
fn text(duration: Duration) -> String {
    let (seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    match (seconds / 60, seconds % 60, millis) {
        (0, 0, millis) => format!("{millis}ms"),
        (0, seconds, 0) => format!("{seconds}s"),
        (0, seconds, millis) => format!("{seconds}.{millis:03}s"),
        (minutes, seconds, _) => format!("{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_written_as_go_does() {
        let millis = |millis| text(Duration::from_millis(millis));
        assert_eq!([500, 10_000, 1500, 90_000].map(millis), ["500ms", "10s", "1.500s", "1m30s"]);
    }
}
