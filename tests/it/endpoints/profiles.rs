//! `/debug/pprof/` on the test process itself.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::response::Response;
use berth::serving::pprof::ProcessProfiles;
use berth_proto::profile::Profile;
use berth_server::routes::pprof;
use berth_sys::jemalloc::Jemalloc;
use prost::Message;

use crate::endpoints::{get, status_and_body};

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_names_who_was_busy() {
    let done = Arc::new(AtomicBool::new(false));
    let until = done.clone();
    let busy = std::thread::spawn(move || spin_until(&until));
    let response = pprof::serve(&ProcessProfiles, &get("/debug/pprof/profile?seconds=2", &[]), "profile").await;
    done.store(true, Ordering::Relaxed);
    busy.join().expect("no panic");
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    let (profile, body) = read(response).await;
    let samples: i64 = profile.sample.iter().filter_map(|sample| sample.value.first()).sum();
    assert!(samples > 20, "{samples} samples of two busy seconds");
    assert!(profile.string_table.iter().any(|text| text.contains("spin_until")), "the busy function has a name");
    let program = std::env::current_exe().expect("this program");
    let program = program.to_str().expect("a plain path");
    assert!(profile.mapping.iter().any(|m| profile.string_table[m.filename as usize].contains(program)));
    let known = |id: &u64| profile.location.iter().any(|l| l.id == *id);
    assert!(profile.sample.iter().flat_map(|sample| &sample.location_id).all(known));
    keep("cpu", body);
}

/// The decoded pprof profile, and its bytes.
async fn read(response: Response) -> (Profile, Vec<u8>) {
    let (status, body) = status_and_body(response).await;
    assert_eq!(status, 200);
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(body.as_slice()).read_to_end(&mut bytes).expect("gzip");
    (Profile::decode(bytes.as_slice()).expect("a profile"), body)
}

fn keep(name: &str, body: Vec<u8>) {
    // `go tool pprof` and similar tools are not on every machine; `KEEP_PROFILE` saves the files for them.
    if let Ok(path) = std::env::var("KEEP_PROFILE") {
        std::fs::write(format!("{path}.{name}"), body).expect("writable");
    }
}

/// Sums of the four values of samples whose stack contains a function.
fn sums(profile: &Profile, function: &str) -> [i64; 4] {
    let name = |at: i64| profile.string_table[usize::try_from(at).expect("a place")].as_str();
    let named = |id: &u64| {
        let lines = profile.location.iter().find(|l| l.id == *id).expect("known").line.iter();
        lines
            .flat_map(|line| profile.function.iter().find(|f| f.id == line.function_id))
            .any(|f| name(f.name).contains(function))
    };
    let mut sums = [0; 4];
    for sample in profile.sample.iter().filter(|sample| sample.location_id.iter().any(named)) {
        sums.iter_mut().zip(&sample.value).for_each(|(sum, value)| *sum += value);
    }
    sums
}

#[inline(never)]
fn hoard(blocks: usize) -> Vec<Vec<u8>> {
    (0..blocks).map(|n| std::hint::black_box(vec![n as u8; 64 << 10])).collect()
}

#[inline(never)]
fn squander(blocks: usize) {
    (0..blocks).for_each(|n| drop(std::hint::black_box(vec![n as u8; 64 << 10])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_names_who_holds_memory_and_who_asked_for_it() {
    let take = async |name: &str, query: &str| {
        let response = pprof::serve(&ProcessProfiles, &get(&format!("/debug/pprof/{name}{query}"), &[]), name).await;
        read(response).await
    };
    let (first, _) = take("heap", "").await;
    let comment = first.string_table[usize::try_from(first.comment[0]).expect("a place")].clone();
    assert!(comment.ends_with("repeat the request"), "{comment}");
    // 64 MB allocated and 64 MB freed again: about 128 samples each.
    let allocated = hoard(1_000);
    squander(1_000);
    let (profile, body) = take("heap", "").await;
    keep("heap", body);
    let near = |bytes: i64| (32 << 20..128 << 20).contains(&bytes);
    let [_, asked, blocks, bytes] = sums(&profile, "hoard");
    assert!(near(asked) && near(bytes) && (500..2_000).contains(&blocks), "{asked} {blocks} {bytes}");
    let [_, asked, _, bytes] = sums(&profile, "squander");
    assert!(near(asked) && bytes == 0, "{asked} {bytes}");
    let innermost = profile.sample.iter().filter_map(|sample| sample.location_id.first());
    let names = innermost.flat_map(|id| profile.location.iter().find(|l| l.id == *id).and_then(|l| l.line.last()));
    for line in names {
        let function = profile.function.iter().find(|f| f.id == line.function_id).expect("known");
        let name = &profile.string_table[usize::try_from(function.name).expect("a place")];
        assert!(!["rjem", "jemalloc", "__rust"].iter().any(|own| name.contains(own)), "{name}");
    }
    // Memory freed during the interval appears as a negative delta.
    let letting_go = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await; // in the middle of the interval
        drop(allocated);
    };
    let ((delta, _), ()) = tokio::join!(take("heap", "?seconds=2"), letting_go);
    let [objects, space, blocks, bytes] = sums(&delta, "hoard");
    assert!((objects, space) == (0, 0) && blocks < 0 && near(-bytes), "{objects} {space} {blocks} {bytes}");
    let (allocs, _) = take("allocs", "").await;
    let shown = |profile: &Profile| {
        profile.string_table[usize::try_from(profile.default_sample_type).expect("a place")].clone()
    };
    assert_eq!((shown(&profile), shown(&allocs)), ("inuse_space".to_owned(), "alloc_space".to_owned()));
    assert_eq!(sums(&allocs, "hoard")[3], 0);
}

#[inline(never)]
fn spin_until(done: &AtomicBool) {
    let mut sum = 0_u64;
    while !done.load(Ordering::Relaxed) {
        sum = std::hint::black_box(sum.wrapping_mul(3) ^ 1);
    }
}
