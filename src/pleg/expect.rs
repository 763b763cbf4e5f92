//! What an event promised, and whether a look shows it yet. Pure.
//!
//! containerd publishes the end of a task a moment before its CRI part has noted it, so the look
//! that follows at once may still see a running container. Such a look is repeated a few times,
//! from 2 ms on, doubling every other time; after that the list is trusted.

use std::time::Duration;

use berth_types::observed::{ContainerState, ObservedPod, SandboxState};

/// What the sender of a hint says of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Something about it changed.
    Anything,
    /// It was created or started. Not urgent: who started it asks for a look when it is done.
    Started,
    /// Its process ended, and the runtime is clearing up after it: a hint that it stopped follows.
    Stopping,
    /// It ended.
    Stopped,
    /// It was removed.
    Gone,
}

/// Events that still have to come true for one pod.
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
/// A pod with more open ones than this is left to the list.
const LIMIT: usize = 64;

impl Expectations {
    /// Notes what was promised.
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

    /// Whether nothing is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Drops what a look shows to be true; the delay after which to look again for the rest,
    /// `None` when nothing is left or all attempts are used up.
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
    use crate::pleg::convert::fixtures::{container, pod};

    #[test]
    fn looks_are_repeated_until_the_event_shows() {
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
