//! The 5-second runtime health check.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::runtime::RuntimeCheck;
use berth_ports::RuntimeState;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::scripted_cri::Fault;

async fn until(state: &mut watch::Receiver<Arc<RuntimeState>>, wanted: impl Fn(&RuntimeState) -> bool) -> Duration {
    let began = Instant::now();
    let wait = state.wait_for(|s| wanted(s));
    tokio::time::timeout(Duration::from_secs(120), wait).await.expect("in time").expect("the check lives");
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_comes_up_is_noticed_quickly_and_one_that_goes_after_thirty_seconds() {
    let bench = Fixture::new();
    let refused = Fault::Error(Code::Unavailable, "connection refused".to_owned());
    bench.cri.fault("status", "", refused.clone(), Some(3));
    let sick = Arc::new(Mutex::new(None::<String>));
    let health = sick.clone();
    let checks: Vec<berth::runtime::HealthCheck> =
        vec![("PLEG", Arc::new(move || health.lock().expect("unpoisoned").clone()))];
    let (check, mut state) = RuntimeCheck::new(bench.cri.clone(), checks);
    let not_yet = "container runtime status check may not have completed yet";
    assert_eq!(state.borrow().runtime_error.as_deref(), Some(not_yet));
    let stop = CancellationToken::new();
    let task = tokio::spawn(check.run(stop.clone()));
    assert!(until(&mut state, |s| s.runtime_error.is_none()).await < Duration::from_secs(1));

    bench.cri.set_conditions(true, false);
    let text = "container runtime network not ready: NetworkReady=false reason:Scripted message:not ready";
    until(&mut state, |s| s.network_error.as_deref() == Some(text) && s.runtime_error.is_none()).await;

    bench.cri.set_conditions(false, true);
    let text = "container runtime not ready: RuntimeReady=false reason:Scripted message:not ready";
    until(&mut state, |s| s.runtime_error.as_deref() == Some(text)).await;
    bench.cri.set_conditions(true, true);
    until(&mut state, |s| s.runtime_error.is_none()).await;

    *sick.lock().expect("unpoisoned") = Some("pleg was last seen active 4m0s ago".to_owned());
    let text = "PLEG is not healthy: pleg was last seen active 4m0s ago";
    until(&mut state, |s| s.runtime_error.as_deref() == Some(text)).await;
    *sick.lock().expect("unpoisoned") = None;
    until(&mut state, |s| s.runtime_error.is_none()).await;

    // AC-03a-21: a reply with one condition counts as such a failed call; the client converts it.
    bench.cri.fault("status", "", refused, None);
    let took = until(&mut state, |s| s.runtime_error.as_deref() == Some("container runtime is down")).await;
    assert!((25..=36).contains(&took.as_secs()), "{took:?}");
    stop.cancel();
    task.await.expect("it ends");
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_down_after_thirty_seconds_and_other_checks_are_still_reported() {
    let bench = Fixture::new();
    let sick = Arc::new(Mutex::new(None::<String>));
    let health = sick.clone();
    let checks: Vec<berth::runtime::HealthCheck> =
        vec![("PLEG", Arc::new(move || health.lock().expect("unpoisoned").clone()))];
    let (check, mut state) = RuntimeCheck::new(bench.cri.clone(), checks);
    let stop = CancellationToken::new();
    let task = tokio::spawn(check.run(stop.clone()));
    until(&mut state, |s| s.runtime_error.is_none()).await;
    // Longer than the timeout of any call.
    bench.cri.fault("status", "", Fault::Hang, None);
    let took = until(&mut state, |s| s.runtime_error.as_deref() == Some("container runtime is down")).await;
    assert!((25..=36).contains(&took.as_secs()), "{took:?}");
    *sick.lock().expect("unpoisoned") = Some("x".to_owned());
    let text = "[container runtime is down, PLEG is not healthy: x]";
    let took = until(&mut state, |s| s.runtime_error.as_deref() == Some(text)).await;
    assert!(took.as_secs() <= 6, "{took:?}");
    assert_eq!(bench.cri.count("status"), 2, "it is asked once, and still is");
    stop.cancel();
    task.await.expect("it ends while the runtime hangs");
}
