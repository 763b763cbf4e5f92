//! Time limit to reach the desired state after all faults are healed.
//!
//! Two seconds, plus what the script itself causes: earned back-offs, grace periods, latencies, and pending deadlines.
//! Each is a known constant of the specification.

use std::time::Duration;

use super::profile::{FaultKind, Profile};

const SECOND: Duration = Duration::from_secs(1);

/// Maximum crash back-off of the simulated agents.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(8);
/// Time after which a container that is going to crash has crashed.
pub const LAST_CRASH: Duration = Duration::from_secs(3);

/// Minimum grace period of a container stop.
const LEAST_GRACE: Duration = Duration::from_secs(2);
/// Maximum number of containers in a pod, of all kinds.
const MOST_CONTAINERS: u32 = 6;

/// Delays caused by the script.
#[derive(Debug, Default)]
pub struct TimeLimit {
    /// The longest grace period of any pod.
    pub grace: Duration,
    /// Sum of all latencies.
    pub latency: Duration,
    /// Number of failed pulls.
    pub pulls: u32,
    /// Whether the response to a create was lost, so that it may still succeed.
    pub doubt: bool,
    /// Whether hung calls reach their deadlines, because no runtime restart interrupts them.
    pub deadlines: bool,
}

impl TimeLimit {
    /// The time limit.
    pub fn granted(&self, profile: &Profile) -> Duration {
        let mut sum = SECOND * 2;
        let mut add = |troubles: &[FaultKind], time: Duration| {
            if troubles.iter().any(|trouble| profile.has(*trouble)) {
                sum += time;
            }
        };
        // An init container, a sidecar, and a container, each in its back-off.
        add(&[FaultKind::Crashes, FaultKind::Rules, FaultKind::SandboxesDie, FaultKind::Reboots], LONGEST_BACKOFF * 3);
        add(&[FaultKind::Crashes, FaultKind::Rules], LAST_CRASH);
        add(&[FaultKind::Stubborn], self.grace + SECOND);
        // A failed sync is retried after 10 to 15 s, an observation after at most 10 s.
        add(&[FaultKind::Errors, FaultKind::LostAnswers, FaultKind::RuntimeRestarts, FaultKind::Disk], SECOND * 25);
        add(&[FaultKind::Hangs, FaultKind::Delays, FaultKind::Victim], SECOND * 25);
        add(&[FaultKind::Events], SECOND * 62);
        add(&[FaultKind::Streams, FaultKind::RuntimeRestarts, FaultKind::Reboots, FaultKind::Victim], SECOND * 3);
        add(&[FaultKind::NotReady], SECOND * 6);
        add(&[FaultKind::Pulls], SECOND * 10 * 2_u32.pow(self.pulls.min(4)));
        add(&[FaultKind::Latency], self.latency * 8);
        if profile.has(FaultKind::Rules) && profile.has(FaultKind::Stubborn) {
            // RestartAllContainers kills one container after the other, each with the minimum grace period.
            sum += LEAST_GRACE * MOST_CONTAINERS;
        }
        if self.doubt || self.deadlines {
            // The runtime may continue a timed-out call for as long as it could have taken.
            sum += SECOND * 135;
        }
        if self.deadlines {
            sum += SECOND * 240 + self.grace;
        }
        sum
    }
}
