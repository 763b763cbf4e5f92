//! Number and use of connections; heartbeats never wait.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::FutureExt;
use tokio::sync::mpsc;

use super::server::{Client, Reply, Server, Settings, json, quiet, until};
use crate::{
    api::{ApiClient, ApiError, Call, RequestClass, Resource, Verb},
    transport::*,
};

fn watch_of(name: &str) -> Call {
    Call::new(Verb::Watch, Resource::SECRETS, "ns", "")
        .query("fieldSelector", format!("metadata.name={name}"))
        .query("watch", "true")
}

fn lease() -> Call {
    Call::update(Resource::LEASES, "kube-node-lease", "n", "{}")
        .on(RequestClass::Heartbeat)
        .within(Duration::from_secs(10))
}

fn connections(server: &Server, part: &str) -> BTreeSet<u64> {
    server.seen().iter().filter(|seen| seen.target.contains(part)).map(|seen| seen.connection).collect()
}

#[tokio::test]
async fn a_heartbeat_waits_for_no_watch() {
    // AC-10-6, and the limit of 8 connections.
    let server = Server::start(Settings::default(), quiet).await;
    let client = server.client().await;
    let begun = Instant::now();
    let mut watches = Vec::new();
    for number in 0..300 {
        watches.push(client.transport.watch(watch_of(&number.to_string())).await.expect("it begins"));
    }
    client.transport.call(lease()).await.expect("renewed");
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    let used = connections(&server, "watch=true");
    assert_eq!(used.len(), 4);
    for connection in used {
        let streams = server.seen().iter().filter(|seen| seen.connection == connection).count();
        assert!(streams <= 80, "{streams} of 100 places");
    }
    assert_eq!(connections(&server, "leases").len(), 1);
    assert!(server.made() <= 8, "{}", server.made());
    assert_eq!(client.metric("berth_api_streams", &["watch"]), 300.0);
    drop(watches);
    until("slots come back", || client.metric("berth_api_streams", &["watch"]) == 0.0).await;
}

#[tokio::test]
async fn a_server_with_few_places_gets_more_connections() {
    let server = Server::start(Settings { streams: 30, ..Settings::default() }, quiet).await;
    let client = server.client().await;
    let watches = (0..25).map(|number| client.transport.watch(watch_of(&number.to_string())).boxed_local());
    let begun = futures::future::join_all(watches).await;
    assert!(begun.iter().all(Result::is_ok));
    assert_eq!(connections(&server, "watch=true").len(), 3, "10 of 30 places are used");
}

#[tokio::test]
async fn everything_works_on_the_first_http() {
    // AC-10-7, AC-10-41
    let server = Server::start(Settings::default(), quiet).await;
    let mut config = server.config();
    config.http = Http::of(|name| (name == "DISABLE_HTTP2").then(|| "1".to_owned()));
    let client = Client::open(config).await;
    let mut watches = Vec::new();
    for number in 0..12 {
        watches.push(client.transport.watch(watch_of(&number.to_string())).await.expect("it begins"));
    }
    let ask = |number: usize| client.transport.call(Call::get(Resource::PODS, "ns", &number.to_string()));
    let answers = futures::future::join_all((0..100).map(ask)).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    client.transport.call(lease()).await.expect("renewed");
    assert_eq!(connections(&server, "watch=true").len(), 12);
    let unary = connections(&server, "/pods/");
    assert!((1..=8).contains(&unary.len()), "{unary:?}");
    let offered = server.state.offered.lock().expect("whole").concat();
    assert!(!offered.is_empty() && offered.iter().all(|name| name == b"http/1.1"), "no h2 is offered");
}

#[tokio::test]
async fn events_come_as_they_are_written() {
    for http2 in [true, false] {
        let (sender, lines) = mpsc::unbounded_channel();
        let lines = std::sync::Mutex::new(Some(lines));
        let server = Server::start(Settings { http2, ..Settings::default() }, move |_| {
            lines.lock().expect("whole").take().map_or(Reply::Cut, Reply::Stream)
        })
        .await;
        let client = server.client().await;
        let mut watch = client.transport.watch(watch_of("s")).await.expect("it begins");
        for piece in ["{\"type\":\"ADDED\"}\n{\"ty", "pe\":\"MODIFIED\"}\n\n"] {
            sender.send(Bytes::from_static(piece.as_bytes())).expect("open");
        }
        assert_eq!(watch.next().await, Some(Ok(Bytes::from_static(b"{\"type\":\"ADDED\"}"))));
        assert_eq!(watch.next().await, Some(Ok(Bytes::from_static(b"{\"type\":\"MODIFIED\"}"))));
        drop(sender);
        assert_eq!((watch.next().await, watch.next().await), (None, None), "a clean end");
    }
}

#[tokio::test]
async fn a_cut_watch_ends_with_an_error() {
    let server = Server::start(Settings::default(), quiet).await;
    let client = server.client().await;
    let mut watch = client.transport.watch(watch_of("s")).await.expect("it begins");
    server.cut();
    assert!(matches!(watch.next().await, Some(Err(ApiError::Lost(_)))));
    assert_eq!(watch.next().await, None);
}

#[tokio::test]
async fn a_heartbeat_that_hangs_goes_out_twice() {
    // AC-10-5: the first connection never answers.
    let server =
        Server::start(Settings::default(), |seen| if seen.connection == 1 { Reply::Hang } else { json("{}") }).await;
    let client = server.client().await;
    let begun = Instant::now();
    client.transport.call(lease()).await.expect("renewed");
    assert!((2.9..6.0).contains(&begun.elapsed().as_secs_f64()), "{:?}", begun.elapsed());
    until("the dead one is closed", || server.open() == 1).await;
    let begun = Instant::now();
    client.transport.call(lease()).await.expect("renewed");
    assert!(begun.elapsed() < Duration::from_secs(2), "on the second one");
    assert_eq!((server.made(), server.seen().len()), (2, 3));
}
