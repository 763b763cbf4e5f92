//! Reviews in flight: single-flight with a limit, in tasks of the server, canceled when it stops.
//!
//! A caller that is canceled does not cancel a review for the others (spec 04 §6.2).

use std::{future::Future, hash::Hash};

use berth_sys::single_flight::{Flight, Full, Role, SingleFlight};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The result of a call; `None` where the call was canceled.
pub type Answer<V> = Flight<Option<V>>;

/// Calls in flight.
pub struct ReviewFlights<K, V: Clone> {
    calls: SingleFlight<K, Option<V>>,
    limit: usize,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl<K, V> ReviewFlights<K, V>
where
    K: Clone + Eq + Hash,
    V: Clone + Send + Sync + 'static,
{
    /// Allows at most `limit` concurrent calls; each is a task of `tasks` and is canceled by `stop`.
    pub fn new(limit: usize, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self { calls: SingleFlight::default(), limit, tasks, stop }
    }

    /// Joins the call in flight for the key, if there is one.
    pub fn join(&self, key: &K) -> Option<Answer<V>> {
        self.calls.join(key)
    }

    /// Starts a call, or joins the one in flight.
    ///
    /// # Errors
    /// If the limit of concurrent calls is reached.
    pub fn start(&self, key: &K, call: impl Future<Output = V> + Send + 'static) -> Result<Answer<V>, Full> {
        let stop = self.stop.clone();
        let call = || async move { stop.run_until_cancelled(call).await };
        let (answer, role) = self.calls.join_or_start_within(self.limit, key.clone(), call)?;
        if role == Role::First {
            self.tasks.spawn(answer.clone());
        }
        Ok(answer)
    }
}

/// Waits for the result; `None` where the call was canceled or panicked.
pub async fn wait<V: Clone>(answer: Answer<V>) -> Option<V> {
    answer.await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn flights(limit: usize) -> ReviewFlights<&'static str, u32> {
        ReviewFlights::new(limit, TaskTracker::new(), CancellationToken::new())
    }

    #[tokio::test]
    async fn who_asks_for_the_same_gets_the_same_answer() {
        let flights = flights(2);
        let (sender, receiver) = oneshot::channel();
        let first = flights.start(&"a", async { receiver.await.expect("received") }).expect("room");
        let second = flights.start(&"a", async { unreachable!("there is a call already") }).expect("the same");
        assert!(flights.join(&"a").is_some() && flights.join(&"b").is_none());
        drop(flights.start(&"b", std::future::pending()).expect("room"));
        assert!(matches!(flights.start(&"c", async { 0 }), Err(Full)));
        drop(first); // cancelling the first caller has no effect
        sender.send(7).expect("a listener");
        assert_eq!(wait(second).await, Some(7));
        let again = flights.start(&"a", async { 8 }).expect("room again");
        assert_eq!(wait(again).await, Some(8));
    }

    #[tokio::test]
    async fn a_call_that_dies_leaves_room() {
        let flights = flights(1);
        let answer = flights.start(&"a", async { panic!("on purpose") }).expect("room");
        assert_eq!(wait(answer).await, None);
        assert_eq!(wait(flights.start(&"a", async { 1 }).expect("room")).await, Some(1));
        let hung = flights.start(&"a", std::future::pending()).expect("room");
        flights.stop.cancel();
        assert_eq!(wait(hung).await, None);
    }
}
