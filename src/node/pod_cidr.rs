//! Updates the runtime with the pod CIDR that the cluster assigned, or that is configured.
//!
//! The runtime configures its network from it, so a failed update is retried with exponential back-off until it
//! succeeds or the CIDR changes. Implements spec 10 §4.1, spec 01 §9.

use std::{fmt::Display, time::Duration};

use futures::future::BoxFuture;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use berth_sys::backoff::Backoff;

/// Delays after failed updates.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// Call that sends a pod CIDR to the runtime.
pub type SendCidr<E> = dyn Fn(String) -> BoxFuture<'static, Result<(), E>> + Send + Sync;

/// Sends each value of `cidrs` to the runtime, until stopped.
pub async fn follow_pod_cidr<E: Display + Send>(
    cidrs: watch::Receiver<String>,
    send: Box<SendCidr<E>>,
    stop: CancellationToken,
) {
    // Either the sender has ended, or the agent stops.
    let _stopped = stop.run_until_cancelled(follow(cidrs, &*send)).await;
}

/// Sends a constant pod CIDR to the runtime, until it accepts it or the agent stops; an empty one is not sent.
pub async fn set_pod_cidr<E: Display + Send>(cidr: String, send: Box<SendCidr<E>>, stop: CancellationToken) {
    // Either the runtime has accepted it, or the agent stops.
    let _stopped = stop.run_until_cancelled(send_until_accepted(&cidr, &*send)).await;
}

async fn follow<E: Display>(mut cidrs: watch::Receiver<String>, send: &SendCidr<E>) {
    loop {
        let cidr = cidrs.borrow_and_update().clone();
        tokio::select! {
            biased;
            moved = cidrs.changed() => if moved.is_err() { return },
            () = send_until_accepted(&cidr, send) => if cidrs.changed().await.is_err() { return },
        }
    }
}

/// Sends a pod CIDR until the runtime accepts it.
async fn send_until_accepted<E: Display>(cidr: &str, send: &SendCidr<E>) {
    if cidr.is_empty() {
        return;
    }
    let mut backoff = BACKOFF;
    while let Err(err) = send(cidr.to_owned()).await {
        let pause = backoff.next_delay();
        if pause == BACKOFF.nth(0) {
            warn!(%err, podCIDR = cidr, "Failed to update pod CIDR of the runtime, will retry");
        } else {
            debug!(%err, podCIDR = cidr, again = ?pause, "Failed to update pod CIDR of the runtime");
        }
        sleep(pause).await;
    }
    info!(podCIDR = cidr, "Updated pod CIDR of the runtime");
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures::FutureExt;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_rejected_pod_cidr_is_retried_until_it_changes() {
        let (send, ranges) = watch::channel(String::new());
        let (stop, calls) = (CancellationToken::new(), Arc::new(Mutex::new(Vec::new())));
        let (begun, seen) = (Instant::now(), calls.clone());
        let update = move |range: String| {
            let outcome = if range == "b" { Ok(()) } else { Err("no") };
            seen.lock().expect("whole").push((range, begun.elapsed().as_secs()));
            async move { outcome }.boxed()
        };
        let task = tokio::spawn({
            let stop = stop.clone();
            async move { follow_pod_cidr(ranges, Box::new(update), stop).await }
        });
        tokio::task::yield_now().await;
        send.send_replace("a".to_owned());
        sleep(Duration::from_secs(130)).await;
        send.send_replace("b".to_owned());
        sleep(Duration::from_secs(500)).await;
        stop.cancel();
        task.await.expect("no panic");
        let of = |range: &str, at: &[u64]| at.iter().map(|at| (range.to_owned(), *at)).collect::<Vec<_>>();
        let expected = [of("a", &[0, 1, 3, 7, 15, 31, 63, 123]), of("b", &[130])].concat();
        assert_eq!(*calls.lock().expect("whole"), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_constant_pod_cidr_is_retried_until_it_is_accepted() {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let update = |failures: usize| -> Box<SendCidr<&'static str>> {
            let calls = calls.clone();
            Box::new(move |cidr| {
                let mut calls = calls.lock().expect("whole");
                calls.push(cidr);
                let outcome = if calls.len() > failures { Ok(()) } else { Err("no") };
                async move { outcome }.boxed()
            })
        };
        set_pod_cidr(String::new(), update(0), CancellationToken::new()).await;
        assert_eq!(*calls.lock().expect("whole"), [""; 0], "there is nothing to send");
        let begun = Instant::now();
        set_pod_cidr("a,b".to_owned(), update(2), CancellationToken::new()).await;
        assert_eq!((calls.lock().expect("whole").len(), begun.elapsed().as_secs()), (3, 3));
        let stop = CancellationToken::new();
        let task = tokio::spawn(set_pod_cidr("a,b".to_owned(), update(usize::MAX), stop.clone()));
        sleep(Duration::from_secs(10)).await;
        stop.cancel();
        task.await.expect("no panic");
        assert_eq!(*calls.lock().expect("whole"), ["a,b"; 7], "retried until the agent stops");
    }
}
