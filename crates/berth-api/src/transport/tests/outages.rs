//! A server that is unreachable and comes back.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::server::{Client, Reply, Server, Settings, json, quiet, until};
use crate::{
    api::{ApiClient, ApiError, Call, RequestClass, Resource, Verb},
    transport::*,
};

fn lease() -> Call {
    Call::update(Resource::LEASES, "kube-node-lease", "n", "{}")
        .on(RequestClass::Heartbeat)
        .within(Duration::from_secs(10))
}

fn watch_of(resource: Resource) -> Call {
    Call::new(Verb::Watch, resource, "", "").query("watch", "true")
}

#[tokio::test]
async fn one_dials_and_the_others_wait() {
    // AC-10-43
    let server = Server::start(Settings::default(), quiet).await;
    let client = server.client().await;
    client.transport.call(lease()).await.expect("renewed");
    server.vanish().await;
    let error = client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect_err("away");
    assert!(matches!(&error, ApiError::Unreachable(text) if text.contains("connection refused")), "{error:?}");
    let begun = Instant::now();
    let again = client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect_err("away");
    assert_eq!(again, error, "the error of the last attempt, at once");
    assert!(begun.elapsed() < Duration::from_millis(700), "{:?}", begun.elapsed());
    assert!(!client.transport.is_reachable());
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..200 {
        let transport = client.transport.clone();
        let resource = if number == 0 { Resource::PODS } else { Resource::SECRETS };
        waiting.spawn(async move {
            let begun = transport.watch(watch_of(resource)).await.map(drop);
            (resource, begun, Instant::now())
        });
    }
    // Long enough for another dial by each pool.
    assert!(client.transport.watch(watch_of(Resource::NODES).within(Duration::from_millis(300))).await.is_err());
    let before = server.state.offered.lock().expect("whole").len();
    server.appear().await;
    let (mut pods, mut last) = (None, None);
    while let Some(done) = waiting.join_next().await {
        let (resource, begun, at) = done.expect("no panic");
        begun.expect("it begins");
        pods = if resource == Resource::PODS { Some(at) } else { pods };
        last = last.max(Some(at));
    }
    let spread = last.expect("some").duration_since(pods.expect("one"));
    assert!((0.5..4.0).contains(&spread.as_secs_f64()), "pods first, the others over two seconds: {spread:?}");
    client.transport.call(lease()).await.expect("renewed");
    let dialled = server.state.offered.lock().expect("whole").len() - before;
    assert!(dialled <= 6, "{dialled} connections for 200 watches");
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.ok();
    until("all is well", || client.transport.is_reachable()).await;
}

#[tokio::test]
async fn a_refused_connection_is_an_error_at_once() {
    let cluster = Cluster { server: "http://127.0.0.1:1".into(), ..Cluster::default() };
    let user = User { token: "secret".into(), ..User::default() };
    let client = Client::open(TransportConfig::new(cluster, user)).await;
    for call in [Call::get(Resource::PODS, "ns", "p"), lease()] {
        let error = client.transport.call(call).await.expect_err("nobody");
        assert_eq!(error, ApiError::Unreachable("dial tcp 127.0.0.1:1: connect: connection refused".into()));
    }
    let watch = watch_of(Resource::PODS).within(Duration::from_millis(50));
    let error = client.transport.watch(watch).await.err();
    assert!(matches!(&error, Some(ApiError::Unreachable(text)) if text.contains("refused")), "{error:?}");
    assert_eq!(client.metric("rest_client_requests_total", &[]), 0.0);
}

#[tokio::test]
async fn black_holes_are_noticed() {
    // AC-10-5, and the acceptance limit: a renewed lease within 20 s.
    let server = Server::start(Settings::default(), quiet).await;
    let mut config = server.config();
    config.http.pings = Pings { idle: Duration::from_millis(500), patience: Duration::from_millis(500) };
    let (client, beating) = (Client::open(config).await, server.client().await);
    beating.transport.call(lease()).await.expect("renewed");
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    let mut watch = client.transport.watch(watch_of(Resource::PODS)).await.expect("it begins");
    server.freeze();
    let begun = Instant::now();
    let read = client.transport.call(Call::get(Resource::PODS, "ns", "p"));
    let (renewed, read, event) = tokio::join!(beating.transport.call(lease()), read, watch.next());
    renewed.expect("on a second connection");
    read.expect("retried on another connection");
    assert!(matches!(event, Some(Err(ApiError::Lost(_)))), "{event:?}");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

/// Configuration whose keep-alive detects nothing for the duration of a test.
fn patient(server: &Server) -> TransportConfig {
    let mut config = server.config();
    // Different values, so that the kind of a timer can be inferred.
    config.http.pings = Pings { idle: Duration::from_secs(900), patience: Duration::from_secs(600) };
    config
}

#[tokio::test]
async fn a_dead_connection_triggers_pings_in_all_pools() {
    // AC-10-5: a heartbeat without a response triggers pings in all pools.
    let server = Server::start(Settings::default(), quiet).await;
    let client = Client::open(patient(&server)).await;
    client.transport.call(lease()).await.expect("renewed");
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    let mut watch = client.transport.watch(watch_of(Resource::PODS)).await.expect("it begins");
    server.freeze();
    let read = client.transport.call(Call::get(Resource::PODS, "ns", "p").within(Duration::from_secs(60)));
    let (renewed, read, event) = tokio::join!(client.transport.call(lease()), read, watch.next());
    renewed.expect("on another connection");
    read.expect("retried on another connection");
    assert!(matches!(event, Some(Err(ApiError::Lost(_)))), "{event:?}");
    client.transport.watch(watch_of(Resource::PODS)).await.expect("it begins again");
}

#[tokio::test]
async fn what_is_alive_outlives_the_doubts_of_others() {
    let (send, lines) = mpsc::unbounded_channel();
    let lines = std::sync::Mutex::new(Some(lines));
    let server = Server::start(Settings::default(), move |seen| match seen.target.as_str() {
        target if target.contains("leases") => Reply::Hang,
        target if target.contains("watch=true") => {
            lines.lock().expect("whole").take().map_or(Reply::Cut, Reply::Stream)
        }
        _ => json("{}"),
    })
    .await;
    let client = Client::open(patient(&server)).await;
    let mut watch = client.transport.watch(watch_of(Resource::PODS)).await.expect("it begins");
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    for _ in 0..2 {
        let beat = client.transport.call(lease().within(Duration::from_secs(4))).await;
        assert!(beat.is_err(), "{beat:?}");
    }
    send.send("{}\n".into()).expect("it is read");
    assert_eq!(watch.next().await, Some(Ok("{}".into())));
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    let of = |part: &str| -> std::collections::BTreeSet<u64> {
        server.seen().iter().filter(|seen| seen.target.contains(part)).map(|seen| seen.connection).collect()
    };
    assert_eq!((of("/pods/").len(), of("watch=true").len()), (1, 1), "on the connections there were");
    assert!(of("leases").len() > 1, "the heartbeat's own were given up");
}

#[tokio::test]
async fn who_gets_through_has_the_others_try() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let client = server.client().await;
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    server.vanish().await;
    // The back-off of its pool grows to many seconds.
    for _ in 0..5 {
        client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect_err("away");
        let mut reached = client.transport.reached();
        let _timeout = tokio::time::timeout(Duration::from_millis(900), reached.changed()).await;
    }
    let mut reached = client.transport.reached();
    let waiting = tokio::spawn({
        let transport = client.transport.clone();
        async move { transport.watch(watch_of(Resource::PODS)).await.map(drop) }
    });
    server.appear().await;
    client.transport.call(lease()).await.expect("renewed");
    reached.changed().await.expect("received");
    until("all dialled", || client.transport.is_reachable()).await;
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("read");
    waiting.await.expect("no panic").expect("it begins");
}

#[tokio::test]
async fn a_server_that_only_accepts_delays_no_request_for_long() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let cluster =
        Cluster { server: format!("https://{address}"), insecure_skip_tls_verify: true, ..Cluster::default() };
    let client = Client::open(TransportConfig::new(cluster, User::default())).await;
    let limit = Duration::from_millis(100);
    let error = client.transport.call(Call::get(Resource::PODS, "ns", "p").within(limit)).await.expect_err("nothing");
    assert!(matches!(error, ApiError::Timeout(_) | ApiError::Unreachable(_)), "{error:?}");
    let begun = Instant::now();
    let beat = tokio::spawn({
        let transport = client.transport.clone();
        async move { transport.call(lease()).await }
    });
    // The earlier one, the heartbeat's, and 3 s later its second one.
    let mut taken = Vec::new();
    for _ in 0..3 {
        taken.push(listener.accept().await.expect("a connection"));
    }
    assert!((2.9..6.0).contains(&begun.elapsed().as_secs_f64()), "{:?}", begun.elapsed());
    beat.abort();
}
