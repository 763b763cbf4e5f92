//! How long the way to the desired state may take once all is healed.
//!
//! Two seconds, and what the script itself has put in the way: back-offs that were earned, graces,
//! latencies, deadlines that still run. Each is a known constant of the specification.

use std::time::Duration;

use super::profile::{Profile, Trouble};

const SECOND: Duration = Duration::from_secs(1);

/// Longest crash back-off the simulated agents know.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(8);
/// After that time at the latest a container that is to crash has crashed.
pub const LAST_CRASH: Duration = Duration::from_secs(3);

/// What a container is always given to stop.
const LEAST_GRACE: Duration = Duration::from_secs(2);
/// Of a pod, of all kinds.
const MOST_CONTAINERS: u32 = 6;

/// What has been put in the way.
#[derive(Debug, Default)]
pub struct Accounts {
    /// The longest grace period of any pod.
    pub grace: Duration,
    /// Sum of all latencies.
    pub latency: Duration,
    /// Refused pulls.
    pub pulls: u32,
    /// Whether the answer to a create was lost, so that it may still come true.
    pub doubt: bool,
    /// Whether hung calls run into their deadlines, for lack of a runtime that is restarted.
    pub deadlines: bool,
}

impl Accounts {
    /// What is granted.
    pub fn granted(&self, profile: &Profile) -> Duration {
        let mut sum = SECOND * 2;
        let mut add = |troubles: &[Trouble], time: Duration| {
            if troubles.iter().any(|trouble| profile.has(*trouble)) {
                sum += time;
            }
        };
        // An init container, a sidecar and a container, each in its back-off.
        add(&[Trouble::Crashes, Trouble::Rules, Trouble::SandboxesDie, Trouble::Reboots], LONGEST_BACKOFF * 3);
        add(&[Trouble::Crashes, Trouble::Rules], LAST_CRASH);
        add(&[Trouble::Stubborn], self.grace + SECOND);
        // A turn that failed is taken again after 10 to 15 s, a look after at most 10 s.
        add(&[Trouble::Errors, Trouble::LostAnswers, Trouble::RuntimeRestarts, Trouble::Disk], SECOND * 25);
        add(&[Trouble::Hangs, Trouble::Delays, Trouble::Victim], SECOND * 25);
        add(&[Trouble::Events], SECOND * 62);
        add(&[Trouble::Streams, Trouble::RuntimeRestarts, Trouble::Reboots, Trouble::Victim], SECOND * 3);
        add(&[Trouble::NotReady], SECOND * 6);
        add(&[Trouble::Pulls], SECOND * 10 * 2_u32.pow(self.pulls.min(4)));
        add(&[Trouble::Latency], self.latency * 8);
        if profile.has(Trouble::Rules) && profile.has(Trouble::Stubborn) {
            // A restart of all kills one after the other, each with the least grace there is.
            sum += LEAST_GRACE * MOST_CONTAINERS;
        }
        if self.doubt || self.deadlines {
            // The runtime may carry on for as long as a call that was given up could have taken.
            sum += SECOND * 135;
        }
        if self.deadlines {
            sum += SECOND * 240 + self.grace;
        }
        sum
    }
}
