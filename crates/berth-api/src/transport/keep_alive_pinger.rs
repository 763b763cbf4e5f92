//! On-demand HTTP/2 pings on all connections once one was found dead.
//!
//! The cause often affects all connections, and a connection with little traffic would detect it late. hyper pings an
//! idle connection and closes it without a pong, using a timer that we provide. It has no call to send a ping now, so
//! the timer expires early: a sleep that waits for silence ends if nothing was received since, and one that waits for
//! the pong is shortened.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hyper::rt::{Sleep, Timer};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::dialer::Pings;

/// Timeout of a triggered ping: a server that is only busy answers sooner, and must not have all nodes reconnect at
/// once.
const PATIENCE: Duration = Duration::from_secs(4);
/// Debounce interval of triggers.
const APART: Duration = Duration::from_secs(1);
/// Maximum delay between hyper's clock read and its timer registration.
const SLACK: Duration = Duration::from_millis(100);

/// Trigger of pings on all connections of a client.
#[derive(Clone, Debug, Default)]
pub struct KeepAlivePinger(watch::Sender<Option<Instant>>);

impl KeepAlivePinger {
    /// Triggers a ping on all silent connections; debounced.
    pub fn trigger(&self) {
        let now = Instant::now();
        self.0.send_if_modified(|last| {
            let is_due = last.is_none_or(|last| now.duration_since(last) >= APART);
            *last = if is_due { Some(now) } else { *last };
            is_due
        });
    }

    /// Time of the last trigger; changes with each.
    pub fn triggers(&self) -> watch::Receiver<Option<Instant>> {
        self.0.subscribe()
    }

    /// Returns the timer for a connection.
    pub fn timer(&self, pings: Pings) -> PingTimer {
        PingTimer { pings, calls: self.triggers() }
    }
}

/// Timer that hyper uses for its keep-alive pings and their timeouts.
pub struct PingTimer {
    pings: Pings,
    calls: watch::Receiver<Option<Instant>>,
}

impl Timer for PingTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until((Instant::now() + duration).into_std())
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn Sleep>> {
        let (deadline, mut calls) = (Instant::from_std(deadline), self.calls.clone());
        let wait = Wait::of(deadline, Instant::now(), self.pings);
        Box::pin(TokioSleep(Box::pin(async move {
            loop {
                let called = *calls.borrow_and_update();
                tokio::select! {
                    () = sleep_until(wait.ends(deadline, called)) => return,
                    Ok(()) = calls.changed() => {}
                }
            }
        })))
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into_std()
    }
}

struct TokioSleep(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

impl Future for TokioSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(context)
    }
}

impl Sleep for TokioSleep {}

/// What a sleep of hyper waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wait {
    /// Silence since that time, when data was last received.
    Silence(Instant),
    /// The pong of a ping that was sent at that time.
    Answer(Instant),
}

impl Wait {
    /// Infers the kind of a sleep, which hyper does not expose. To mistake silence for a pong costs a few seconds; the
    /// opposite would close a live connection: so in doubt it is a pong.
    fn of(deadline: Instant, now: Instant, pings: Pings) -> Self {
        let lasts = deadline.saturating_duration_since(now);
        if lasts <= pings.patience && lasts + SLACK >= pings.patience {
            return Self::Answer(now);
        }
        Self::Silence(deadline.checked_sub(pings.idle).unwrap_or(now))
    }

    /// When the sleep ends.
    fn ends(self, deadline: Instant, called: Option<Instant>) -> Instant {
        match (self, called) {
            (Self::Silence(since), Some(called)) if since < called => called.min(deadline),
            // Sent before the trigger, or because of it.
            (Self::Answer(sent), Some(called)) if sent < called + APART => deadline.min(sent.max(called) + PATIENCE),
            _ => deadline,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trigger_pings_silent_connections_and_spares_active_ones() {
        let pings = Pings { idle: Duration::from_secs(30), patience: Duration::from_secs(15) };
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        for (what, now, deadline, called, expected) in [
            ("no hurry, silence", 0.0, 30.0, None, 30.0),
            ("no hurry, ping", 30.0, 45.0, None, 45.0),
            ("heard before", 0.0, 30.0, Some(10.0), 10.0),
            ("heard before, looked at again", 10.0, 35.0, Some(10.0), 10.0),
            ("heard after", 12.0, 42.0, Some(10.0), 42.0),
            ("pinged in the hurry", 10.0, 25.0, Some(10.0), 14.0),
            ("pinged before", 9.0, 24.0, Some(10.0), 14.0),
            ("pinged long before", 0.0, 15.0, Some(14.0), 15.0),
            ("pinged long after", 40.0, 55.0, Some(10.0), 55.0),
        ] {
            let wait = Wait::of(at(deadline), at(now), pings);
            assert_eq!(wait.ends(at(deadline), called.map(at)), at(expected), "{what}");
        }
        let wait = Wait::of(at(15.0), at(0.000_1), pings);
        assert!(matches!(wait, Wait::Answer(_)), "hyper read the clock a moment ago: {wait:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_trigger_wakes_sleeping_timers() {
        let (pinger, begun) = (KeepAlivePinger::default(), Instant::now());
        let timer = pinger.timer(Pings { idle: Duration::from_secs(30), patience: Duration::from_secs(15) });
        let sleeping = tokio::spawn(timer.sleep(Duration::from_secs(30)));
        tokio::time::sleep(Duration::from_secs(5)).await;
        pinger.trigger();
        sleeping.await.expect("no panic");
        assert_eq!(begun.elapsed(), Duration::from_secs(5));
        timer.sleep(Duration::from_secs(15)).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(9), "its ping");
        timer.sleep(Duration::from_secs(30)).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(39), "it was heard since");
    }
}
