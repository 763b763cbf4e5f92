//! Operations that panic, hang, or take long.

use std::sync::mpsc;

use super::*;

fn mounts_failed(bench: &Bench) -> Vec<String> {
    bench.recorded_events().into_iter().filter(|event| event.starts_with("FailedMount")).collect()
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_a_failure_like_any_other() {
    // Spec 07 §3.5: a panic counts as a failure with back-off, and the owner of the volume continues.
    let bench = bench(staged());
    for call in ["stage", "publish", "unpublish", "unstage"] {
        bench.plugin.next(call, Answer::Panics);
    }
    let (began, mut shown) = (Instant::now(), bench.want("a", 1));
    bench.until_mounted("a", &mut shown).await;
    assert_eq!(began.elapsed(), Duration::from_millis(1500), "half a second, a second");
    assert_eq!(
        bench.recorded_events(),
        [
            "FailedMount MountVolume.MountDevice failed for volume \"pv\" : panic: on purpose",
            "FailedMount MountVolume.SetUp failed for volume \"pv\" : panic: on purpose"
        ]
    );
    bench.until_gone("a").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = bench.plugin.calls();
    assert_eq!(
        calls,
        ["stage a", "stage a", "publish a", "publish a", "unpublish a", "unpublish a", "unstage", "unstage"]
    );
}

/// In real time, because blocking work runs on a thread. The plugin's timeout is short.
#[tokio::test]
async fn what_hangs_takes_one_thread_and_its_volume_waits() {
    let bench = bench(VolumeTraits::default());
    bench.plugin.limited(Duration::from_millis(20));
    let (release, hangs) = mpsc::channel();
    bench.plugin.next("publish", Answer::Blocks(Arc::new(Mutex::new(hangs))));
    let mut shown = bench.want("a", 1);
    let message = "MountVolume.SetUp failed for volume \"pv\" : an earlier operation on this volume has not returned";
    let waited = async {
        while !bench.recorded_events().iter().any(|line| line.ends_with(message)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.expect("received");
    assert_eq!(bench.plugin.calls(), ["publish a"], "nothing else was begun");
    assert!(mounts_failed(&bench)[0].ends_with("context deadline exceeded"));
    release.send(()).expect("it waits");
    bench.until_mounted("a", &mut shown).await;
    assert_eq!(bench.plugin.calls(), ["publish a"; 2]);
}

#[tokio::test(start_paused = true)]
async fn what_shows_signs_of_life_is_not_given_up() {
    let bench = bench(VolumeTraits::default());
    bench.plugin.next("publish", Answer::Works(Duration::from_secs(1800)));
    let (began, mut shown) = (Instant::now(), bench.want("a", 1));
    let mounted = |shown: &Arc<ObservedVolume>| shown.pods.values().any(|own| own.presence == MountPresence::Present);
    tokio::time::timeout(Duration::from_secs(7200), shown.wait_for(mounted)).await.expect("in time").expect("it lives");
    assert_eq!((began.elapsed(), bench.recorded_events()), (Duration::from_secs(1800), Vec::new()));
    assert_eq!(bench.plugin.calls(), ["publish a"]);
}

#[tokio::test(start_paused = true)]
async fn the_deletion_of_its_pod_ends_what_takes_long() {
    let bench = bench(VolumeTraits::default());
    bench.plugin.next("publish", Answer::Works(Duration::from_secs(1800)));
    let shown = bench.want("a", 1);
    tokio::time::sleep(Duration::from_secs(300)).await;
    let began = Instant::now();
    bench.until_gone("a").await;
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
    assert_eq!(bench.plugin.calls(), ["publish a", "unpublish a"]);
    drop(shown);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_fails_starves_no_other() {
    let bench = bench(staged());
    for _ in 0..8 {
        bench.plugin.next("publish a", Answer::Fails(OpError::failed("not this one")));
    }
    let mut first = bench.want("a", 1);
    tokio::time::sleep(Duration::from_secs(20)).await; // its sixth try is sixteen seconds away
    let (began, mut second) = (Instant::now(), bench.want("b", 1));
    bench.until_mounted("b", &mut second).await;
    assert_eq!(began.elapsed(), Duration::ZERO, "it has no pause of its own");
    bench.until_mounted("a", &mut first).await;
}

#[tokio::test(start_paused = true)]
async fn what_fails_in_turns_comes_to_rest() {
    let bench = bench(staged());
    let mut shown = bench.want("a", 1);
    bench.until_mounted("a", &mut shown).await;
    for _ in 0..100 {
        bench.plugin.next("unpublish a", Answer::Fails(OpError::failed("busy")));
        bench.plugin.next("publish b", Answer::Fails(OpError::failed("busy")));
    }
    let left = bench.board.remove_desired(&"a".into());
    let other = bench.want("b", 1);
    tokio::time::sleep(Duration::from_secs(240)).await;
    // At 0, ½, 1½, 3½, … and from then on every two minutes.
    let tries = bench.plugin.calls().len();
    assert!(tries <= 24, "{tries} calls: {:?}", bench.plugin.calls());
    drop((left, other));
}
