//! Names of hosts, looked up as libc does, which cannot be called off: a lookup that hangs keeps its thread.
//!
//! There are few threads for that. So a name is looked up once for all who want it at the same time: one that hangs takes
//! one of them, however often it is asked for. And the names of one pod take a few of them at most.

use std::{
    collections::HashMap,
    net::{SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, timeout_at},
};

use super::dial::{DialError, Why};
use berth_types::PodUid;

/// Names that are looked up at a time.
pub const LOOKUPS: usize = 16;
/// Of them those that one pod may have begun.
const OF_ONE_POD: usize = 4;

/// The addresses of a name, once they are known; none where it has none. Each with its scope; the port means nothing.
type Found = watch::Receiver<Option<Arc<[SocketAddr]>>>;
/// What looks a name up.
type Resolve = dyn Fn(&str) -> Vec<SocketAddr> + Send + Sync;

/// The lookups that are under way.
pub struct Lookups {
    permits: Arc<Semaphore>,
    /// What is left to the pods that have begun some.
    shares: Mutex<HashMap<PodUid, Arc<Semaphore>>>,
    under_way: Mutex<HashMap<String, Found>>,
    resolve: Arc<Resolve>,
}

impl Lookups {
    /// Of the machine.
    pub fn new() -> Self {
        Self::by(|host| {
            // A port has to be named. Why there is no address nobody is told either.
            (host, 0).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
        })
    }

    /// By that, which may block.
    pub fn by(resolve: impl Fn(&str) -> Vec<SocketAddr> + Send + Sync + 'static) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(LOOKUPS)),
            shares: Mutex::default(),
            under_way: Mutex::default(),
            resolve: Arc::new(resolve),
        }
    }

    /// The addresses of a host that a pod wants.
    ///
    /// # Errors
    /// There are none, or they are not known in time. Where other lookups take all threads, or all that the pod may
    /// have, that is no fault of this host.
    pub async fn find(&self, host: &str, pod: &PodUid, deadline: Instant) -> Result<Arc<[SocketAddr]>, DialError> {
        let late = |why| DialError { text: format!("dial tcp: lookup {host}: i/o timeout"), why };
        let mut found = match self.of(host) {
            Some(found) => found,
            None => {
                let share = timeout_at(deadline, self.share_of(pod).acquire_owned()).await;
                let Ok(Ok(share)) = share else { return Err(late(Why::Ours)) };
                let permit = timeout_at(deadline, self.permits.clone().acquire_owned()).await;
                let Ok(Ok(permit)) = permit else { return Err(late(Why::Ours)) };
                self.begin(host, [share, permit])
            }
        };
        let known = timeout_at(deadline, found.wait_for(Option::is_some)).await.map_err(|_| late(Why::Late))?;
        let addresses = known.ok().and_then(|known| known.clone()).unwrap_or_default();
        if addresses.is_empty() {
            return Err(DialError { text: format!("dial tcp: lookup {host}: no such host"), why: Why::Refused });
        }
        Ok(addresses)
    }

    /// The lookup of a host that is under way.
    fn of(&self, host: &str) -> Option<Found> {
        let under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.get(host).filter(|found| is_under_way(found)).cloned()
    }

    /// What a pod has left. Those of which no lookup is under way, and that wait for none, are forgotten.
    fn share_of(&self, pod: &PodUid) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.retain(|other, share| other == pod || Arc::strong_count(share) > 1);
        shares.entry(pod.clone()).or_insert_with(|| Arc::new(Semaphore::new(OF_ONE_POD))).clone()
    }

    /// Begins a lookup, unless somebody else has meanwhile.
    fn begin(&self, host: &str, permits: [OwnedSemaphorePermit; 2]) -> Found {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.retain(|_, found| is_under_way(found));
        if let Some(found) = under_way.get(host) {
            return found.clone();
        }
        let (tell, found) = watch::channel(None);
        under_way.insert(host.to_owned(), found.clone());
        let (resolve, host) = (self.resolve.clone(), host.to_owned());
        tokio::task::spawn_blocking(move || {
            tell.send_replace(Some(resolve(&host).into()));
            drop(permits); // not before the lookup has really ended
        });
        found
    }
}

/// Whoever looks it up still does: an answer is for those who asked before it came.
fn is_under_way(found: &Found) -> bool {
    found.has_changed().is_ok()
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

    /// Finds an address for each name but `none`; those that begin with `hangs` when told to. Tells what it was asked.
    fn of_which_some_hang() -> (Lookups, mpsc::Sender<()>, tokio::sync::mpsc::UnboundedReceiver<String>) {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let (begun, names) = tokio::sync::mpsc::unbounded_channel();
        let lookups = Lookups::by(move |host| {
            let _ = begun.send(host.to_owned());
            if host.starts_with("hangs") {
                let _ = held.lock().expect("no panic").recv();
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
            let error = lookups.find("hangs", &pod, Instant::now()).await.expect_err("it hangs");
            assert_eq!((error.why, error.text.as_str()), (Why::Late, "dial tcp: lookup hangs: i/o timeout"));
        }
        let found = lookups.find("fine", &pod, late()).await.expect("found");
        assert_eq!(*found, [SocketAddr::from(([10, 0, 0, 1], 0))]);
        let error = lookups.find("none", &pod, late()).await.expect_err("it has none");
        assert_eq!((error.why, error.text.as_str()), (Why::Refused, "dial tcp: lookup none: no such host"));
        for number in 1..LOOKUPS {
            let other = PodUid::from(format!("u{number}").as_str());
            lookups.find(&format!("hangs{number}"), &other, soon()).await.expect_err("it hangs");
        }
        let error = lookups.find("fine", &pod, soon()).await.expect_err("all are taken");
        assert_eq!(error.why, Why::Ours, "which says nothing of that host");
        drop(release);
        assert!(lookups.find("fine", &pod, late()).await.is_ok(), "they come back");
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
            let error = lookups.find(&format!("hangs{number}"), &pod, soon()).await.expect_err("it hangs");
            let expected = if number < OF_ONE_POD { Why::Late } else { Why::Ours };
            assert_eq!(error.why, expected, "{number}");
        }
        assert_eq!(lookups.find("fine", &pod, soon()).await.expect_err("it has its share").why, Why::Ours);
        assert!(lookups.find("fine", &other, late()).await.is_ok(), "others have theirs");
        drop(release);
        assert!(lookups.find("fine", &pod, late()).await.is_ok(), "it comes back");
        assert!(lookups.find("fine", &other, late()).await.is_ok());
        let asked = std::iter::from_fn(|| names.try_recv().ok()).filter(|name| name.starts_with("hangs")).count();
        assert_eq!(asked, OF_ONE_POD);
        lookups.permits.acquire_many(LOOKUPS.try_into().expect("few")).await.expect("open").forget();
        drop(lookups.share_of(&PodUid::from("w")));
        let kept = lookups.shares.lock().expect("no panic").keys().cloned().collect::<Vec<_>>();
        assert_eq!(kept, [PodUid::from("w")], "nobody's is kept");
    }
}
