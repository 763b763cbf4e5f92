//! Host name lookups for probes: single-flight, and limited in total and per pod.
//!
//! Lookups use libc, which cannot cancel them: one that hangs occupies its thread. Few threads are available for that,
//! so concurrent lookups of a name share one thread, and the names of one pod occupy only a few threads.

use std::{
    collections::HashMap,
    net::{SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use super::connector::{ConnectErrorKind, DialError};
use berth_sys::single_flight::{Flight, SingleFlight};
use berth_types::PodUid;

/// Maximum number of concurrent lookups.
pub const LOOKUPS: usize = 16;
/// Maximum number of concurrent lookups that one pod has started.
const OF_ONE_POD: usize = 4;

/// Addresses of a name; empty if it has none. Each includes its scope; the port is meaningless.
type HostAddresses = Arc<[SocketAddr]>;
/// Resolver function.
type Resolve = dyn Fn(&str) -> Vec<SocketAddr> + Send + Sync;

/// Lookups in flight.
pub struct HostResolver {
    permits: Arc<Semaphore>,
    /// Remaining permits of the pods that have started lookups.
    shares: Mutex<HashMap<PodUid, Arc<Semaphore>>>,
    under_way: SingleFlight<String, HostAddresses>,
    resolve: Arc<Resolve>,
}

impl HostResolver {
    /// Creates lookups through the machine's resolver.
    pub fn new() -> Self {
        Self::by(|host| {
            // The function requires a port. Why there is no address is not reported.
            (host, 0).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
        })
    }

    /// Creates lookups through `resolve`, which may block.
    pub fn by(resolve: impl Fn(&str) -> Vec<SocketAddr> + Send + Sync + 'static) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(LOOKUPS)),
            shares: Mutex::default(),
            under_way: SingleFlight::default(),
            resolve: Arc::new(resolve),
        }
    }

    /// Returns the addresses of a host for a probe of `pod`.
    ///
    /// # Errors
    /// The host has no address, or the lookup does not end before `deadline`. If other lookups occupy all threads, or
    /// all permits of the pod, the error is [`ConnectErrorKind::LocalLimit`], not the host's.
    pub async fn resolve(&self, host: &str, pod: &PodUid, deadline: Instant) -> Result<Arc<[SocketAddr]>, DialError> {
        let late = |why| DialError { text: format!("dial tcp: lookup {host}: i/o timeout"), why };
        let found = match self.under_way.join(&host.to_owned()) {
            Some(found) => found,
            None => {
                let share = timeout_at(deadline, self.share_of(pod).acquire_owned()).await;
                let Ok(Ok(share)) = share else { return Err(late(ConnectErrorKind::LocalLimit)) };
                let permit = timeout_at(deadline, self.permits.clone().acquire_owned()).await;
                let Ok(Ok(permit)) = permit else { return Err(late(ConnectErrorKind::LocalLimit)) };
                self.begin(host, [share, permit])
            }
        };
        let known = timeout_at(deadline, found).await.map_err(|_| late(ConnectErrorKind::TimedOut))?;
        let addresses = known.unwrap_or_default();
        if addresses.is_empty() {
            return Err(DialError {
                text: format!("dial tcp: lookup {host}: no such host"),
                why: ConnectErrorKind::Refused,
            });
        }
        Ok(addresses)
    }

    /// What a pod has left. Those of which no lookup is under way, and that wait for none, are forgotten.
    fn share_of(&self, pod: &PodUid) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.retain(|other, share| other == pod || Arc::strong_count(share) > 1);
        shares.entry(pod.clone()).or_insert_with(|| Arc::new(Semaphore::new(OF_ONE_POD))).clone()
    }

    /// Begins a lookup, unless somebody else has meanwhile.
    fn begin(&self, host: &str, permits: [OwnedSemaphorePermit; 2]) -> Flight<HostAddresses> {
        let (resolve, name) = (self.resolve.clone(), host.to_owned());
        let lookup = move || {
            let found = HostAddresses::from(resolve(&name));
            drop(permits); // not before the lookup has really ended
            found
        };
        self.under_way
            .join_or_spawn(host.to_owned(), || async { tokio::task::spawn_blocking(lookup).await.unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// A resolver with an address for each name but `none`; names that begin with `hangs` block until released. Sends
    /// each requested name.
    fn of_which_some_hang() -> (HostResolver, mpsc::Sender<()>, tokio::sync::mpsc::UnboundedReceiver<String>) {
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let (begun, names) = tokio::sync::mpsc::unbounded_channel();
        let lookups = HostResolver::by(move |host| {
            let _ = begun.send(host.to_owned());
            if host.starts_with("hangs") {
                let _ = released.lock().expect("no panic").recv();
            }
            if host == "none" { Vec::new() } else { vec![SocketAddr::from(([10, 0, 0, 1], 0))] }
        });
        (lookups, release, names)
    }

    #[tokio::test]
    async fn a_name_that_hangs_takes_one_thread_and_no_names_of_others() {
        let (lookups, release, mut names) = of_which_some_hang();
        let pod = PodUid::from("u");
        for _ in 0..2 * LOOKUPS {
            let error = lookups.resolve("hangs", &pod, Instant::now()).await.expect_err("it hangs");
            assert_eq!(
                (error.why, error.text.as_str()),
                (ConnectErrorKind::TimedOut, "dial tcp: lookup hangs: i/o timeout")
            );
        }
        let found = lookups.resolve("fine", &pod, late()).await.expect("found");
        assert_eq!(*found, [SocketAddr::from(([10, 0, 0, 1], 0))]);
        let error = lookups.resolve("none", &pod, late()).await.expect_err("it has none");
        assert_eq!(
            (error.why, error.text.as_str()),
            (ConnectErrorKind::Refused, "dial tcp: lookup none: no such host")
        );
        for number in 1..LOOKUPS {
            let other = PodUid::from(format!("u{number}").as_str());
            lookups.resolve(&format!("hangs{number}"), &other, soon()).await.expect_err("it hangs");
        }
        let error = lookups.resolve("fine", &pod, soon()).await.expect_err("all are taken");
        assert_eq!(error.why, ConnectErrorKind::LocalLimit, "a local limit is no failure of that host");
        drop(release);
        assert!(lookups.resolve("fine", &pod, late()).await.is_ok(), "they come back");
        let mut asked = Vec::new();
        while let Ok(name) = names.try_recv() {
            asked.push(name);
        }
        assert_eq!(asked.iter().filter(|name| *name == "hangs").count(), 1);
        assert_eq!(asked.iter().filter(|name| *name == "fine").count(), 2, "an answer is not kept");
    }

    #[tokio::test]
    async fn names_of_one_pod_take_a_share_of_the_threads() {
        let (lookups, release, mut names) = of_which_some_hang();
        let (pod, other) = (PodUid::from("u"), PodUid::from("v"));
        for number in 0..LOOKUPS {
            let error = lookups.resolve(&format!("hangs{number}"), &pod, soon()).await.expect_err("it hangs");
            let expected = if number < OF_ONE_POD { ConnectErrorKind::TimedOut } else { ConnectErrorKind::LocalLimit };
            assert_eq!(error.why, expected, "{number}");
        }
        assert_eq!(
            lookups.resolve("fine", &pod, soon()).await.expect_err("it has its share").why,
            ConnectErrorKind::LocalLimit
        );
        assert!(lookups.resolve("fine", &other, late()).await.is_ok(), "others have theirs");
        drop(release);
        assert!(lookups.resolve("fine", &pod, late()).await.is_ok(), "it comes back");
        assert!(lookups.resolve("fine", &other, late()).await.is_ok());
        let asked = std::iter::from_fn(|| names.try_recv().ok()).filter(|name| name.starts_with("hangs")).count();
        assert_eq!(asked, OF_ONE_POD);
        lookups.permits.acquire_many(LOOKUPS.try_into().expect("few")).await.expect("open").forget();
        drop(lookups.share_of(&PodUid::from("w")));
        let kept = lookups.shares.lock().expect("no panic").keys().cloned().collect::<Vec<_>>();
        assert_eq!(kept, [PodUid::from("w")], "nobody's is kept");
    }
}
