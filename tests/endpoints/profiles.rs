//! `/debug/pprof/` on this very process.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use berth::{agent::server_tools::ProcessProfiles, proto::profile::Profile, server::routes::pprof};
use prost::Message;

use crate::{get, told};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_names_who_was_busy() {
    let done = Arc::new(AtomicBool::new(false));
    let until = done.clone();
    let busy = std::thread::spawn(move || spin_until(&until));
    let response = pprof::serve(&ProcessProfiles, &get("/debug/pprof/profile?seconds=2", &[]), "profile").await;
    done.store(true, Ordering::Relaxed);
    busy.join().expect("no panic");
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    let (status, body) = told(response).await;
    assert_eq!(status, 200);
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(body.as_slice()).read_to_end(&mut bytes).expect("gzip");
    let profile = Profile::decode(bytes.as_slice()).expect("a profile");
    let samples: i64 = profile.sample.iter().filter_map(|sample| sample.value.first()).sum();
    assert!(samples > 20, "{samples} samples of two busy seconds");
    assert!(profile.string_table.iter().any(|text| text.contains("spin_until")), "the busy function has a name");
    assert!(profile.mapping.iter().any(|m| profile.string_table[m.filename as usize].contains("endpoints")));
    let known = |id: &u64| profile.location.iter().any(|l| l.id == *id);
    assert!(profile.sample.iter().flat_map(|sample| &sample.location_id).all(known));
    // `go tool pprof` and its relatives are not on every machine; where one is, it may have a look.
    if let Ok(path) = std::env::var("KEEP_PROFILE") {
        std::fs::write(path, body).expect("writable");
    }
}

#[inline(never)]
fn spin_until(done: &AtomicBool) {
    let mut sum = 0_u64;
    while !done.load(Ordering::Relaxed) {
        sum = std::hint::black_box(sum.wrapping_mul(3) ^ 1);
    }
}
