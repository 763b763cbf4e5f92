//! Keeps what is asked of the API server to a rate: `kubeAPIQPS` and `kubeAPIBurst`, one bucket for
//! all that a client asks (spec 01 §10.3).

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};
use tower::{Layer, Service};

/// How much may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests per second.
    qps: u32,
    /// Requests at once after a pause.
    burst: u32,
}

impl Rate {
    /// As the configuration spells it: 0 (or less) is not "unlimited", but 5 per second, and 10 at once.
    pub fn of(qps: i32, burst: i32) -> Self {
        let or = |value: i32, default| u32::try_from(value).ok().filter(|value| *value > 0).unwrap_or(default);
        Self { qps: or(qps, 5), burst: or(burst, 10) }
    }
}

impl Default for Rate {
    fn default() -> Self {
        Self::of(50, 100)
    }
}

/// Puts the rate around a client's service.
#[derive(Clone, Copy, Debug)]
pub struct Paced(pub Rate);

impl<S> Layer<S> for Paced {
    type Service = PacedService<S>;

    fn layer(&self, inner: S) -> PacedService<S> {
        PacedService { inner, bucket: Bucket { rate: self.0, full: None }, waits: None, may: false }
    }
}

/// A service whose requests wait for their turn.
pub struct PacedService<S> {
    inner: S,
    bucket: Bucket,
    waits: Option<Pin<Box<Sleep>>>,
    /// Whether the next request has its turn.
    may: bool,
}

struct Bucket {
    rate: Rate,
    /// When it is full again.
    full: Option<Instant>,
}

impl Bucket {
    /// Takes one, or tells when there will be one.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let one = Duration::from_secs(1) / self.rate.qps;
        let base = self.full.map_or(now, |full| full.max(now));
        let room = one * (self.rate.burst - 1);
        match base.checked_sub(room).filter(|free| *free > now) {
            Some(free) => Err(free),
            None => {
                self.full = Some(base + one);
                Ok(())
            }
        }
    }
}

impl<S, A> Service<A> for PacedService<S>
where
    S: Service<A>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        while !self.may {
            if let Some(wait) = &mut self.waits {
                ready!(wait.as_mut().poll(context));
                self.waits = None;
            }
            match self.bucket.take(Instant::now()) {
                Ok(()) => self.may = true,
                Err(free) => self.waits = Some(Box::pin(sleep_until(free))),
            }
        }
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: A) -> S::Future {
        self.may = false;
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::{ServiceExt, service_fn};

    use super::*;

    #[test]
    fn nothing_is_no_freedom() {
        assert_eq!(Rate::of(0, 0), Rate { qps: 5, burst: 10 });
        assert_eq!(Rate::of(-1, 7), Rate { qps: 5, burst: 7 });
        assert_eq!(Rate::of(50, 100), Rate::default());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_burst_it_goes_slowly() {
        let mut service = Paced(Rate::of(10, 3)).layer(service_fn(|_: ()| async { Ok::<_, Infallible>(()) }));
        let begun = Instant::now();
        let mut took = Vec::new();
        for _ in 0..6 {
            let Ok(()) = service.ready().await.expect("it is").call(()).await;
            took.push(begun.elapsed().as_millis());
        }
        let rounded: Vec<u128> = took.iter().map(|ms| (ms + 50) / 100).collect();
        assert_eq!(rounded, [0, 0, 0, 1, 2, 3], "{took:?}");
        tokio::time::advance(Duration::from_secs(10)).await;
        let begun = Instant::now();
        for _ in 0..3 {
            let Ok(()) = service.ready().await.expect("it is").call(()).await;
        }
        assert!(begun.elapsed() < Duration::from_millis(50), "a pause fills the bucket");
    }
}
