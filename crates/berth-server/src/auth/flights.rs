//! Single-flight: concurrent calls with the same key share one call and its result.
//!
//! A call runs in its own task: a caller that is canceled does not cancel it for the others (spec 04 §6.2).

use std::{
    collections::HashMap,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Receiver of the result of a call.
pub type Answer<V> = watch::Receiver<Option<V>>;

/// The limit of concurrent calls is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Calls in flight.
pub struct Flights<K, V> {
    running: Mutex<HashMap<K, Answer<V>>>,
    limit: usize,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl<K, V> Flights<K, V>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Allows at most `limit` concurrent calls; each is a task of `tasks` and is canceled by `stop`.
    pub fn new(limit: usize, tasks: TaskTracker, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self { running: Mutex::default(), limit, tasks, stop })
    }

    /// Joins the call in flight for the key, if there is one.
    pub fn join(&self, key: &K) -> Option<Answer<V>> {
        self.running().get(key).cloned()
    }

    /// Starts a call, or joins the one in flight.
    ///
    /// # Errors
    /// If the limit of concurrent calls is reached.
    pub fn start(self: &Arc<Self>, key: &K, call: impl Future<Output = V> + Send + 'static) -> Result<Answer<V>, Full> {
        let mut running = self.running();
        if let Some(answer) = running.get(key) {
            return Ok(answer.clone());
        }
        if running.len() >= self.limit {
            return Err(Full);
        }
        let (tell, answer) = watch::channel(None);
        running.insert(key.clone(), answer.clone());
        drop(running);
        let (landing, stop) = (Landing { flights: self.clone(), key: key.clone() }, self.stop.clone());
        self.tasks.spawn(async move {
            let landing = landing;
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                value = call => {
                    drop(landing); // callers that come now find the cached result
                    tell.send_replace(Some(value));
                }
            }
        });
        Ok(answer)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<K, Answer<V>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the result; `None` where the call was canceled.
pub async fn wait<V: Clone>(mut answer: Answer<V>) -> Option<V> {
    answer.wait_for(Option::is_some).await.ok().and_then(|value| value.clone())
}

/// Removes a call from the map when it ends, also by a panic.
struct Landing<K: Eq + Hash, V> {
    flights: Arc<Flights<K, V>>,
    key: K,
}

impl<K: Eq + Hash, V> Drop for Landing<K, V> {
    fn drop(&mut self) {
        self.flights.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn flights(limit: usize) -> Arc<Flights<&'static str, u32>> {
        Flights::new(limit, TaskTracker::new(), CancellationToken::new())
    }

    #[tokio::test]
    async fn who_asks_for_the_same_gets_the_same_answer() {
        let flights = flights(2);
        let (say, said) = oneshot::channel();
        let first = flights.start(&"a", async { said.await.expect("told") }).expect("room");
        let second = flights.start(&"a", async { unreachable!("there is a call already") }).expect("the same");
        assert!(flights.join(&"a").is_some() && flights.join(&"b").is_none());
        flights.start(&"b", std::future::pending()).expect("room");
        assert!(matches!(flights.start(&"c", async { 0 }), Err(Full)));
        drop(first); // cancelling the first caller has no effect
        say.send(7).expect("a listener");
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
