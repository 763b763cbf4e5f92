//! Names of hosts, looked up as libc does, which cannot be called off: a lookup that hangs keeps its thread.
//!
//! There are few threads for that. So a name is looked up once for all who want it at the same time: one that hangs takes
//! one of them, however often it is asked for.

use std::{
    collections::HashMap,
    net::{SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout_at},
};

use super::dial::{DialError, Why};

/// Names that are looked up at a time.
pub const LOOKUPS: usize = 16;

/// The addresses of a name, once they are known; none where it has none. Each with its scope; the port means nothing.
type Found = watch::Receiver<Option<Arc<[SocketAddr]>>>;
/// What looks a name up.
type Resolve = dyn Fn(&str) -> Vec<SocketAddr> + Send + Sync;

/// The lookups that are under way.
pub struct Lookups {
    permits: Arc<Semaphore>,
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
        Self { permits: Arc::new(Semaphore::new(LOOKUPS)), under_way: Mutex::default(), resolve: Arc::new(resolve) }
    }

    /// The addresses of a host.
    ///
    /// # Errors
    /// There are none, or they are not known in time. Where others' lookups take all threads, that is no fault of this
    /// host.
    pub async fn find(&self, host: &str, deadline: Instant) -> Result<Arc<[SocketAddr]>, DialError> {
        let late = |why| DialError { text: format!("dial tcp: lookup {host}: i/o timeout"), why };
        let mut found = match self.of(host) {
            Some(found) => found,
            None => {
                let permit = timeout_at(deadline, self.permits.clone().acquire_owned()).await;
                let Ok(Ok(permit)) = permit else { return Err(late(Why::Ours)) };
                self.begin(host, permit)
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

    /// Begins a lookup, unless somebody else has meanwhile.
    fn begin(&self, host: &str, permit: tokio::sync::OwnedSemaphorePermit) -> Found {
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
            drop(permit); // not before the lookup has really ended
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

    #[tokio::test]
    async fn a_name_that_hangs_takes_one_thread_and_no_names_of_others() {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let (begun, mut names) = tokio::sync::mpsc::unbounded_channel();
        let lookups = Lookups::by(move |host| {
            let _ = begun.send(host.to_owned());
            if host.starts_with("hangs") {
                let _ = held.lock().expect("no panic").recv();
            }
            if host == "none" { Vec::new() } else { vec![SocketAddr::from(([10, 0, 0, 1], 0))] }
        });
        for _ in 0..2 * LOOKUPS {
            let error = lookups.find("hangs", Instant::now()).await.expect_err("it hangs");
            assert_eq!((error.why, error.text.as_str()), (Why::Late, "dial tcp: lookup hangs: i/o timeout"));
        }
        assert_eq!(*lookups.find("fine", late()).await.expect("found"), [SocketAddr::from(([10, 0, 0, 1], 0))]);
        let error = lookups.find("none", late()).await.expect_err("it has none");
        assert_eq!((error.why, error.text.as_str()), (Why::Refused, "dial tcp: lookup none: no such host"));
        for number in 1..LOOKUPS {
            lookups.find(&format!("hangs{number}"), soon()).await.expect_err("it hangs");
        }
        let error = lookups.find("fine", soon()).await.expect_err("all are taken");
        assert_eq!(error.why, Why::Ours, "which says nothing of that host");
        drop(release);
        assert!(lookups.find("fine", late()).await.is_ok(), "they come back");
        let mut asked = Vec::new();
        while let Ok(name) = names.try_recv() {
            asked.push(name);
        }
        assert_eq!(asked.iter().filter(|name| *name == "hangs").count(), 1);
        assert_eq!(asked.iter().filter(|name| *name == "fine").count(), 2, "an answer is not kept");
    }
}
