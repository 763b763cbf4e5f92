//! Single-flight: concurrent callers with the same key share one call and its result.

use std::{
    collections::HashMap,
    future::Future,
    hash::Hash,
    panic::AssertUnwindSafe,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};

/// The shared call panicked; every caller receives this error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the shared call panicked")]
pub struct CallPanicked;

type Call<V> = BoxFuture<'static, Result<V, CallPanicked>>;

/// One caller's share of a call. The call runs while it is awaited, and is canceled once all shares are dropped.
pub type Flight<V> = Shared<Call<V>>;

/// Whether a caller started the call or joined one in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Started it.
    First,
    /// It shares the result of a call that another caller started.
    Joined,
}

/// The limit of concurrent calls is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Calls in flight, by key. A result is not cached: a later caller starts a new call.
///
/// Callers drive the call together: a caller that gives up does not cancel it for the others, only the last one does.
/// To let a call run without callers, a task awaits it too; [`SingleFlight::join_or_spawn`] does that.
pub struct SingleFlight<K, V: Clone>(Mutex<HashMap<K, WeakShared<Call<V>>>>);

impl<K, V: Clone> Default for SingleFlight<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone + Send + Sync + 'static> SingleFlight<K, V> {
    /// Joins the call in flight for the key, if there is one.
    pub fn join(&self, key: &K) -> Option<Flight<V>> {
        self.running().get(key).and_then(WeakShared::upgrade)
    }

    /// Joins the call in flight for the key, or starts one.
    pub fn join_or_start<F>(&self, key: K, call: impl FnOnce() -> F) -> (Flight<V>, Role)
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut running = self.running();
        match running.get(&key).and_then(WeakShared::upgrade) {
            Some(flight) => (flight, Role::Joined),
            None => (start(&mut running, key, call()), Role::First),
        }
    }

    /// Joins the call in flight for the key, or starts one unless `limit` calls are in flight.
    ///
    /// # Errors
    /// The limit is reached.
    pub fn join_or_start_within<F>(
        &self,
        limit: usize,
        key: K,
        call: impl FnOnce() -> F,
    ) -> Result<(Flight<V>, Role), Full>
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut running = self.running();
        match running.get(&key).and_then(WeakShared::upgrade) {
            Some(flight) => Ok((flight, Role::Joined)),
            None if running.len() >= limit => Err(Full),
            None => Ok((start(&mut running, key, call()), Role::First)),
        }
    }

    /// Joins the call in flight for the key, or starts one in a task of its own: it ends even if all callers give up.
    pub fn join_or_spawn<F>(&self, key: K, call: impl FnOnce() -> F) -> Flight<V>
    where
        F: Future<Output = V> + Send + 'static,
    {
        let (flight, role) = self.join_or_start(key, call);
        if role == Role::First {
            tokio::spawn(flight.clone().map(drop));
        }
        flight
    }

    /// The map, without calls that have ended.
    fn running(&self) -> MutexGuard<'_, HashMap<K, WeakShared<Call<V>>>> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|_, flight| flight.upgrade().is_some_and(|flight| flight.peek().is_none()));
        running
    }
}

fn start<K: Eq + Hash, V: Clone + Send + Sync + 'static>(
    running: &mut HashMap<K, WeakShared<Call<V>>>,
    key: K,
    call: impl Future<Output = V> + Send + 'static,
) -> Flight<V> {
    let call = AssertUnwindSafe(call).catch_unwind().map(|result| result.map_err(|_| CallPanicked));
    let flight = call.boxed().shared();
    if let Some(weak) = flight.downgrade() {
        running.insert(key, weak);
    }
    flight
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use tokio::time::{sleep, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A call that takes a second and returns how many calls were begun.
    fn count(begun: &Arc<AtomicU32>) -> impl Future<Output = u32> + Send + 'static + use<> {
        let number = begun.fetch_add(1, Ordering::Relaxed) + 1;
        async move {
            sleep(SECOND).await;
            number
        }
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_callers_share_a_call_and_later_ones_do_not() {
        let (flights, begun) = (SingleFlight::default(), Arc::default());
        let (first, role) = flights.join_or_start("a", || count(&begun));
        assert_eq!(role, Role::First);
        let (second, role) = flights.join_or_start("a", || count(&begun));
        assert_eq!(role, Role::Joined);
        assert!(flights.join(&"a").is_some() && flights.join(&"b").is_none());
        let (other, _) = flights.join_or_start("b", || count(&begun));
        assert_eq!(futures::join!(first, second, other), (Ok(1), Ok(1), Ok(2)));
        assert!(flights.join(&"a").is_none(), "a result is not kept");
        assert_eq!(flights.join_or_start("a", || count(&begun)).0.await, Ok(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_gives_up_does_not_cancel_the_others() {
        let (flights, begun) = (SingleFlight::default(), Arc::default());
        let (first, _) = flights.join_or_start("a", || count(&begun));
        let (second, _) = flights.join_or_start("a", || count(&begun));
        let second = tokio::spawn(second);
        assert!(timeout(SECOND / 2, first).await.is_err(), "the first one drove the call");
        assert_eq!(second.await.expect("no panic"), Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_caller_that_gives_up_cancels_the_call() {
        let flights = SingleFlight::default();
        let resource = Arc::new(());
        let call = resource.clone();
        let (flight, _) = flights.join_or_start("a", || async move {
            let _call = call;
            std::future::pending::<()>().await;
        });
        assert!(timeout(SECOND, flight.clone()).await.is_err());
        assert_eq!(Arc::strong_count(&resource), 2, "one caller is left");
        drop(flight);
        assert_eq!(Arc::strong_count(&resource), 1);
        assert!(flights.join(&"a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_spawned_call_ends_without_callers() {
        let (flights, begun) = (SingleFlight::default(), Arc::default());
        drop(flights.join_or_spawn("a", || count(&begun)));
        sleep(SECOND / 2).await;
        assert_eq!(flights.join_or_spawn("a", || count(&begun)).await, Ok(1), "joined");
        drop(flights.join_or_spawn("a", || count(&begun)));
        sleep(2 * SECOND).await;
        assert!(flights.join(&"a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_reaches_all_callers_as_an_error() {
        async fn fails() -> u32 {
            sleep(SECOND).await;
            panic!("on purpose")
        }
        let flights = SingleFlight::default();
        let first = flights.join_or_spawn("a", fails);
        let (second, role) = flights.join_or_start("a", || async { 2 });
        assert_eq!(role, Role::Joined);
        assert_eq!(futures::join!(first, second), (Err(CallPanicked), Err(CallPanicked)));
        assert_eq!(flights.join_or_start("a", || async { 3 }).0.await, Ok(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_refuses_new_calls_only() {
        let (flights, begun) = (SingleFlight::default(), Arc::default());
        let (first, _) = flights.join_or_start_within(1, "a", || count(&begun)).expect("room");
        assert!(flights.join_or_start_within(1, "a", || count(&begun)).is_ok(), "joined");
        assert!(matches!(flights.join_or_start_within(1, "b", || count(&begun)), Err(Full)));
        assert_eq!(first.await, Ok(1));
        assert!(flights.join_or_start_within(1, "b", || count(&begun)).is_ok(), "room again");
    }
}
