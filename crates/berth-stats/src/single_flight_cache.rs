//! Single-flight cache: concurrent callers share one computation, and its result for a while.
//!
//! The computation runs in a task of its own: a caller may be dropped, the others still receive the result. It must
//! terminate by itself; deadlines belong inside. Its calls belong to the span of the caller that starts it.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures::FutureExt;
use tokio::time::Instant;

use berth_sys::single_flight::{Flight, SingleFlight};

/// Caches the last result for a limited time, and shares the computation in progress.
pub struct SingleFlightCache<T: Clone> {
    /// Locked while a computation is joined or started, and before one ends: nobody misses a result.
    last: Arc<Mutex<Last<T>>>,
    computation: SingleFlight<(), T>,
    keep: Duration,
}

/// Last result, and when its computation began.
type Last<T> = Option<(Instant, T)>;

impl<T: Clone + Send + Sync + 'static> SingleFlightCache<T> {
    /// Creates an empty cache that drops a result `keep` after it was produced: pages are large.
    pub fn new(keep: Duration) -> Self {
        Self { last: Arc::default(), computation: SingleFlight::default(), keep }
    }

    /// Returns the last result if its computation began no longer than `age` ago.
    pub fn cached(&self, age: Duration) -> Option<T> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().filter(|(began, _)| began.elapsed() <= age).map(|(_, last)| last.clone())
    }

    /// Returns a result whose computation began no longer than `age` ago, or waits for the one in progress; `None` if
    /// it panicked.
    pub async fn fresh<F>(&self, age: Duration, work: impl FnOnce() -> F) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let flight = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((began, last)) = &*last
                && began.elapsed() <= age
            {
                return Some(last.clone());
            }
            self.join(work)
        };
        flight.await.ok()
    }

    /// Like [`Self::fresh`], for work that returns its own start time because it may use older inputs.
    pub async fn fresh_since<F>(&self, age: Duration, work: impl FnOnce() -> F) -> Option<T>
    where
        F: Future<Output = (Instant, T)> + Send + 'static,
    {
        let flight = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((since, last)) = &*last
                && since.elapsed() <= age
            {
                return Some(last.clone());
            }
            self.join_since(work)
        };
        flight.await.ok()
    }

    /// Returns the last result, however old; starts a computation if it is older than `age`. Without a result, waits
    /// up to `patience` for the first one.
    pub async fn recent<F>(&self, age: Duration, patience: Duration, work: impl FnOnce() -> F) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let flight = {
            let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let is_old = last.as_ref().is_none_or(|(began, _)| began.elapsed() > age);
            let flight = is_old.then(|| self.join(work));
            match (last.clone(), flight) {
                (Some((_, last)), _) => return Some(last),
                (None, flight) => flight?,
            }
        };
        tokio::time::timeout(patience, flight).await.ok()?.ok()
    }

    /// Returns the computation in progress, or starts one.
    fn join<F>(&self, work: impl FnOnce() -> F) -> Flight<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        self.join_since(|| {
            let (began, work) = (Instant::now(), work());
            work.map(move |answer| (began, answer))
        })
    }

    fn join_since<F>(&self, work: impl FnOnce() -> F) -> Flight<T>
    where
        F: Future<Output = (Instant, T)> + Send + 'static,
    {
        self.computation.join_or_spawn((), || {
            let (work, last, keep) = (work(), self.last.clone(), self.keep);
            berth_otel::in_current_span(async move {
                let (since, answer) = work.await;
                *last.lock().unwrap_or_else(PoisonError::into_inner) = Some((since, answer.clone()));
                tokio::spawn(forget(Arc::downgrade(&last), since, keep));
                answer
            })
        })
    }
}

/// Drops the result of that start time after `keep`, unless a newer one replaced it.
async fn forget<T>(last: Weak<Mutex<Last<T>>>, began: Instant, keep: Duration) {
    tokio::time::sleep(keep).await;
    if let Some(last) = last.upgrade() {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_some_and(|(last, _)| *last == began) {
            *last = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use berth_metrics::Registry;
    use berth_otel::{Scope, TraceExportSettings};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn slow(count: Arc<AtomicU32>) -> u32 {
        tokio::time::sleep(SECOND).await;
        count.fetch_add(1, Ordering::Relaxed) + 1
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_at_the_same_time_shares_the_work() {
        let (memo, count) = (SingleFlightCache::new(60 * SECOND), Arc::<AtomicU32>::default());
        let ask = || memo.fresh(2 * SECOND, || slow(count.clone()));
        assert_eq!(futures::future::join_all([ask(), ask(), ask()]).await, [Some(1); 3]);
        assert_eq!(ask().await, Some(1), "still young");
        tokio::time::sleep(2 * SECOND).await;
        assert_eq!(ask().await, Some(2), "age counts from when the work began");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_as_old_as_what_it_is_made_from() {
        let (memo, count) = (SingleFlightCache::new(60 * SECOND), Arc::<AtomicU32>::default());
        let since = Instant::now();
        let ask = || {
            let count = count.clone();
            memo.fresh_since(2 * SECOND, || async move { (since, slow(count).await) })
        };
        assert_eq!((ask().await, ask().await), (Some(1), Some(1)));
        tokio::time::sleep(SECOND + SECOND / 2).await;
        assert_eq!(ask().await, Some(2), "the work is young, its source is not");
    }

    #[tokio::test(start_paused = true)]
    async fn work_goes_on_without_who_asked() {
        let (memo, count) = (SingleFlightCache::new(60 * SECOND), Arc::<AtomicU32>::default());
        let gone = tokio::time::timeout(SECOND / 2, memo.fresh(SECOND, || slow(count.clone()))).await;
        assert!(gone.is_err());
        tokio::time::sleep(SECOND).await;
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_answer_is_better_than_none() {
        let (memo, count) = (SingleFlightCache::new(60 * SECOND), Arc::<AtomicU32>::default());
        let ask = |patience| memo.recent(10 * SECOND, patience, || slow(count.clone()));
        assert_eq!(ask(SECOND / 2).await, None, "the first one takes longer");
        assert_eq!(ask(SECOND).await, Some(1));
        tokio::time::sleep(20 * SECOND).await;
        let began = Instant::now();
        assert_eq!((ask(SECOND).await, began.elapsed()), (Some(1), Duration::ZERO));
        tokio::time::sleep(2 * SECOND).await;
        assert_eq!(ask(SECOND).await, Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn unrequested_values_are_dropped() {
        let memo = SingleFlightCache::new(5 * SECOND);
        let page = Arc::new(());
        let answer = memo.fresh(SECOND, || std::future::ready(page.clone())).await;
        assert!(answer.is_some() && memo.cached(SECOND).is_some());
        drop(answer);
        tokio::time::sleep(6 * SECOND).await;
        assert_eq!(Arc::strong_count(&page), 1);
    }

    #[tokio::test]
    async fn work_belongs_to_the_trace_of_the_caller_that_starts_it() {
        let settings = TraceExportSettings {
            endpoint: Some("127.0.0.1:1".to_owned()),
            sampling_rate_per_million: 1_000_000,
            host_name: "node".to_owned(),
        };
        berth_otel::start_export(&settings, &Registry::new()).expect("an address");
        let span = berth_otel::root_span(Scope::Server, "request", Vec::new);
        let own = span.run(async { berth_otel::current_trace_id() }).await;
        assert!(own.is_some());
        let memo = SingleFlightCache::new(60 * SECOND);
        let work = || async {
            tokio::task::yield_now().await;
            berth_otel::current_trace_id()
        };
        // The caller starts the work and gives up; one without a span drives it to its end.
        let first = span.run(async { memo.fresh(SECOND, work).now_or_never() }).await;
        assert_eq!(first, None);
        assert_eq!(memo.fresh(60 * SECOND, || async { None }).await, Some(own));
        std::mem::forget(span); // nothing is exported: there is no collector
    }

    #[tokio::test]
    async fn a_panic_is_no_answer_and_not_the_last_word() {
        let memo = SingleFlightCache::<u32>::new(SECOND);
        assert_eq!(memo.fresh(SECOND, || async { panic!("of the test") }).await, None);
        assert_eq!(memo.fresh(SECOND, || async { 7 }).await, Some(7));
    }
}
