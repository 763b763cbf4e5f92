//! One timer for the next thing to do, whatever that is.
//!
//! Each time a thread wakes for nothing costs about as much as a probe. A timer that is moved to a later moment still
//! wakes it at the earlier one, and so does a queue of delays between its wheel's turns, so this one is made anew.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use tokio::time::{Instant, Sleep, sleep_until};

/// The timer.
#[derive(Default)]
pub struct Alarm(Option<Pin<Box<Sleep>>>);

impl Alarm {
    /// Not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ready at that moment; never where there is none.
    pub fn poll(&mut self, at: Option<Instant>, context: &mut Context<'_>) -> Poll<()> {
        let Some(at) = at else {
            self.0 = None;
            return Poll::Pending;
        };
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.set(sleep_until(at));
        }
        timer.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use tokio::time::{advance, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_moment_that_was_asked_for_last() {
        let (mut alarm, begun) = (Alarm::new(), Instant::now());
        let at = |seconds: u64| Some(begun + Duration::from_secs(seconds));
        let mut rings = async |moment| {
            let rang = timeout(Duration::from_secs(60), poll_fn(|context| alarm.poll(moment, context))).await;
            rang.map(|()| begun.elapsed().as_secs()).ok()
        };
        assert_eq!(rings(at(5)).await, Some(5));
        assert_eq!(rings(at(5)).await, Some(5), "it is over");
        assert_eq!(rings(None).await, None);
        assert_eq!(rings(at(70)).await, Some(70));

        let (mut alarm, begun) = (Alarm::new(), Instant::now());
        let at = |seconds: u64| Some(begun + Duration::from_secs(seconds));
        let mut is_ringing =
            async |moment| poll_fn(|context| Poll::Ready(alarm.poll(moment, context).is_ready())).await;
        assert!(!is_ringing(at(5)).await && !is_ringing(at(20)).await && !is_ringing(at(9)).await);
        advance(Duration::from_secs(10)).await;
        assert!(!is_ringing(at(20)).await, "no earlier one counts");
        assert!(is_ringing(at(10)).await);
    }
}
