//! `/containerLogs` over the wire.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::server::fixture::{PATIENCE, RunningListener};

#[tokio::test]
async fn refusals_come_in_the_spec_s_order() {
    // AC-04-13, AC-04-14
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (target, status, body) in [
        ("n/q/c?tailLines=x", 400, "{\"message\": \"Unable to decode query.\"}"),
        ("n/q/c?tail=-1", 422, "{\"message\": \"Invalid request.\"}"),
        ("n/q/c", 404, "pod \"q\" does not exist"),
        (
            "n/p/c?stream=Stdout",
            400,
            "unable to return the given log stream: \"Stdout\". Please enable PodLogsQuerySplitStreams feature gate in kubelet",
        ),
        ("n/p/c?previous", 400, "previous terminated container \"c\" in pod \"p\" not found"),
        ("n/p/c?stream=All", 200, "a line\n"),
    ] {
        let (got, _, text) = served.ask("GET", &format!("/containerLogs/{target}"), "").await;
        assert_eq!((got, text.as_str()), (status, body), "{target}");
    }
    let (_, head, _) = served.ask("GET", "/containerLogs/n/p/c", "").await;
    assert!(head.contains("transfer-encoding: chunked") && !head.contains("content-type"), "{head}");
}

#[tokio::test]
async fn names_in_paths_are_names() {
    // `..` and encoded slashes lead to a redirect, a pod of that name, or no route.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (target, status, body) in [
        ("n/../../etc/c", 307, "<a href=\"/etc/c\">Temporary Redirect</a>.\n\n"),
        ("n/../../it's/c", 307, "<a href=\"/it&#39;s/c\">Temporary Redirect</a>.\n\n"),
        ("n/%2e%2e/c", 404, "pod \"..\" does not exist"),
        ("n/..%2f..%2fetc/c", 404, "404: Page Not Found"),
        ("n/a%2fb/c", 404, "404: Page Not Found"),
        ("n/%2fetc%2fshadow/c", 404, "404: Page Not Found"),
    ] {
        let (got, _, text) = served.ask("GET", &format!("/containerLogs/{target}"), "").await;
        assert_eq!((got, text.as_str()), (status, body), "{target}");
    }
}

#[tokio::test]
async fn a_caller_follows_so_many_logs_and_no_more() {
    // Spec 04 §11: 256 followers per identity; reading without following is not counted.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let request = "GET /containerLogs/n/p/silent?follow=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n";
    let mut followers = Vec::new();
    for _ in 0..berth_server::FOLLOWS {
        let mut stream = served.connect().await;
        stream.write_all(request.as_bytes()).await.expect("taken");
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.expect("a head");
        assert_eq!(&head, b"HTTP/1.1 200");
        followers.push(stream);
    }
    let one_more = || served.ask("GET", "/containerLogs/n/p/c?follow=1", "");
    let (status, head, body) = one_more().await;
    assert_eq!((status, body.as_str()), (429, "too many followed logs: limit of \"U\" is 256\n"));
    assert!(head.contains("x-node-agent-error: too-many-follows") && head.contains("retry-after: "), "{head}");
    assert_eq!(served.ask("GET", "/containerLogs/n/p/c", "").await.0, 200);
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
    followers.pop();
    let again = async {
        while one_more().await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.expect("there is room again");
}

#[tokio::test]
async fn a_log_that_fails_half_way_has_its_error_and_no_last_chunk() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let request = "GET /containerLogs/n/p/broken HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n";
    let answer = served.raw(request).await;
    assert!(answer.contains("half\n") && answer.contains("containerd://x"), "{answer}");
    assert!(!answer.ends_with("0\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn the_head_comes_before_the_first_line_and_a_reader_ends_with_its_client() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for container in ["silent", "endless"] {
        let mut stream = served.connect().await;
        let request = format!(
            "GET /containerLogs/n/p/{container}?follow=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("taken");
        let mut head = [0; 12];
        tokio::time::timeout(PATIENCE, stream.read_exact(&mut head)).await.expect("at once").expect("a head");
        assert_eq!(&head, b"HTTP/1.1 200");
        assert_eq!(served.players.readers.load(Ordering::SeqCst), 1);
        drop(stream);
        let gone = async {
            while served.players.readers.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone).await.expect("it ends");
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_blocks_no_other() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let mut stream = served.connect().await;
    let request = "GET /containerLogs/n/p/endless HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("taken");
    let mut one = [0; 1];
    stream.read_exact(&mut one).await.expect("an answer");
    // Other clients are served while the writer waits.
    for _ in 0..50 {
        assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
    }
    assert_eq!(served.players.readers.load(Ordering::SeqCst), 1, "it waits for its client");
}
