//! Expected state changes after runtime events, checked against observations. Pure.
//!
//! containerd publishes the exit of a task shortly before its CRI plugin has recorded it, so a query
//! right after the event may still show a running container. Such a query is repeated a few times, with
//! delays from 2 ms, doubling every other time; after that the list is trusted.

use std::time::Duration;

use berth_types::observation::{ContainerState, ObservedPod, SandboxState};

/// State change that an event announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Any change.
    Anything,
    /// The object was created or started. Not urgent: the component that started it requests an
    /// observation afterwards.
    Started,
    /// The process exited, and the runtime is cleaning up: a stop event follows.
    Stopping,
    /// The object stopped.
    Stopped,
    /// The object was removed.
    Gone,
}

/// Expected changes of one pod that are not observed yet.
#[derive(Debug, Default)]
pub struct Expectations {
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    object: String,
    expect: Expect,
    attempts: u32,
}

const FIRST: Duration = Duration::from_millis(2);
const ATTEMPTS: u32 = 14;
/// Maximum expectations per pod; others are left to the list.
const LIMIT: usize = 64;

impl Expectations {
    /// Adds an expected change.
    pub fn add(&mut self, object: &str, expect: Expect) {
        let expect = match expect {
            Expect::Stopping | Expect::Stopped => Expect::Stopped,
            Expect::Gone => Expect::Gone,
            Expect::Anything | Expect::Started => return,
        };
        self.open.retain(|o| o.object != object);
        if self.open.len() < LIMIT {
            self.open.push(Open { object: object.to_owned(), expect, attempts: 0 });
        }
    }

    /// Whether nothing is expected.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Removes the changes that an observation shows; returns the delay until the next query for the
    /// rest, `None` if nothing is left or all attempts are used up.
    pub fn check(&mut self, pod: &ObservedPod) -> Option<Duration> {
        self.open.retain_mut(|o| {
            o.attempts += 1;
            o.attempts <= ATTEMPTS && !holds(pod, &o.object, o.expect)
        });
        let least = self.open.iter().map(|o| o.attempts).min()?;
        Some(FIRST * 2_u32.saturating_pow(least.saturating_sub(1) / 2))
    }
}

fn holds(pod: &ObservedPod, object: &str, expect: Expect) -> bool {
    let ended = |alive: bool| expect == Expect::Stopped && !alive;
    if let Some(container) = pod.containers.iter().find(|c| c.id.as_str() == object) {
        return ended(matches!(container.state, ContainerState::Running | ContainerState::Created));
    }
    pod.sandboxes.iter().find(|s| s.id.as_str() == object).is_none_or(|s| ended(s.state == SandboxState::Ready))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pleg::cri_conversions::fixtures::{container, pod};

    #[test]
    fn observations_are_repeated_until_the_event_shows() {
        let mut open = Expectations::default();
        open.add("c1", Expect::Stopped);
        open.add("c2", Expect::Started);
        let running = pod([container("c1", "main", ContainerState::Running)]);
        let ms = Duration::from_millis;
        assert_eq!(open.check(&running), Some(ms(2)));
        assert_eq!(open.check(&running), Some(ms(2)));
        assert_eq!(open.check(&pod([container("c1", "main", ContainerState::Exited)])), None);
        assert_eq!(open.check(&running), None, "forgotten once it showed");
    }

    #[test]
    fn a_promise_that_never_shows_is_given_up() {
        let mut open = Expectations::default();
        open.add("c1", Expect::Gone);
        let exited = pod([container("c1", "main", ContainerState::Exited)]);
        let delays: Vec<_> = std::iter::from_fn(|| open.check(&exited)).collect();
        assert_eq!(delays.len(), ATTEMPTS as usize);
        assert_eq!(delays.last(), Some(&Duration::from_millis(128)));
    }

    #[test]
    fn what_is_absent_is_stopped_and_gone() {
        for expect in [Expect::Stopped, Expect::Gone] {
            let mut open = Expectations::default();
            open.add("c1", expect);
            assert_eq!(open.check(&pod([])), None);
        }
    }
}
