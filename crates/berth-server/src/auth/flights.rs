//! One call per key at a time: whoever asks for the same meanwhile gets the same answer.
//!
//! A call belongs to nobody: that the first caller hangs up does not take the answer from the
//! others (spec 04 §6.2).

use std::{
    collections::HashMap,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What a caller waits for.
pub type Answer<V> = watch::Receiver<Option<V>>;

/// There are as many calls as there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Calls under way.
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
    /// At most `limit` at a time, each a task of `tasks` that ends with `stop`.
    pub fn new(limit: usize, tasks: TaskTracker, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self { running: Mutex::default(), limit, tasks, stop })
    }

    /// The call for that key, if there is one.
    pub fn join(&self, key: &K) -> Option<Answer<V>> {
        self.running().get(key).cloned()
    }

    /// Calls, or joins the call there is.
    ///
    /// # Errors
    /// There are too many others.
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
                    drop(landing); // who comes now finds what the call has stored
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

/// Waits for an answer; `None` where the call was cut off.
pub async fn wait<V: Clone>(mut answer: Answer<V>) -> Option<V> {
    answer.wait_for(Option::is_some).await.ok().and_then(|value| value.clone())
}

/// Takes a call off the list however it ends, by a panic too.
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
        drop(first); // that the first caller leaves changes nothing
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
