//! Changes of client certificate and authorities, and a server that sends GOAWAY.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::server::{Authority, Client, ReceivedRequest, Reply, Server, Settings, endless, json, status, until};
use crate::{
    api::{ApiClient, ApiError, Call, RequestClass, Resource, Verb},
    transport::*,
};

fn get(name: &str) -> Call {
    Call::get(Resource::PODS, "ns", name)
}

fn pair(pair: &(String, String)) -> CertifiedPair {
    CertifiedPair::from_pem(pair.0.as_bytes(), pair.1.as_bytes()).expect("a pair")
}

fn leaf(pair: &CertifiedPair) -> Option<Vec<u8>> {
    pair.chain().first().map(|leaf| leaf.to_vec())
}

/// Watches never end, `slow` blocks until it is released, and everything else is answered.
fn answers(slow: &Arc<AtomicBool>) -> impl Fn(&ReceivedRequest) -> Reply + use<> {
    let slow = slow.clone();
    move |seen| {
        if seen.target.contains("/secrets") {
            return endless();
        }
        if seen.target.ends_with("/slow") {
            let (sender, lines) = mpsc::unbounded_channel();
            let slow = slow.clone();
            tokio::spawn(async move {
                until("it is let go", || slow.load(Ordering::SeqCst)).await;
                let _ = sender.send(Bytes::from_static(b"{}")); // nobody waits, which the test detects
            });
            return Reply::Stream(lines);
        }
        json("{}")
    }
}

#[tokio::test]
async fn a_new_certificate_takes_over_without_a_loss() {
    // AC-10-37, AC-01-34
    let slow = Arc::new(AtomicBool::new(false));
    let server = Server::start(Settings::default(), answers(&slow)).await;
    let clients = Authority::new("clients");
    let (old, new) = (pair(&clients.client("old")), pair(&clients.client("new")));
    let identity = ClientIdentity::anonymous();
    let client = Client::open(server.config().with_identity(identity.clone())).await;
    client.transport.call(get("anonymous")).await.expect("an answer");
    identity.set(Some(old.clone()));
    server.until("the anonymous connection goes", |server| server.open() == 0).await;
    let mut watches = Vec::new();
    for _ in 0..5 {
        let watch = Call::new(Verb::Watch, Resource::SECRETS, "ns", "");
        watches.push(client.transport.watch(watch).await.expect("it begins"));
    }
    let under_way = tokio::spawn({
        let transport = client.transport.clone();
        async move { transport.call(get("slow")).await }
    });
    server.until("it is under way", |server| server.seen().iter().any(|seen| seen.target.ends_with("/slow"))).await;
    let begun = Instant::now();
    identity.set(Some(new.clone()));
    // A separate task notices the change.
    loop {
        client.transport.call(get("later")).await.expect("an answer");
        if server.seen().last().expect("one").who == leaf(&new) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(1), "the old one is still shown");
    }
    let ended = futures::future::join_all(watches.iter_mut().map(|watch| watch.next())).await;
    assert_eq!(ended, [const { None }; 5], "they end cleanly");
    assert!(begun.elapsed() < Duration::from_secs(5), "within two seconds or so");
    slow.store(true, Ordering::SeqCst);
    assert!(under_way.await.expect("no panic").is_ok(), "what was under way is not lost");
    server.until("the old connections are closed", |server| server.open() == 1).await;
    let who: BTreeSet<_> = server.seen().into_iter().map(|seen| seen.who).collect();
    assert_eq!(who, BTreeSet::from([None, leaf(&old), leaf(&new)]));
}

#[tokio::test]
async fn who_we_were_is_not_refused_for_long() {
    let server = Server::start(Settings::default(), |seen| match &seen.who {
        _ if seen.target.contains("watch") => Reply::Hang,
        Some(_) => json("{}"),
        None => status(401),
    })
    .await;
    let identity = ClientIdentity::anonymous();
    let client = Client::open(server.config().with_identity(identity.clone())).await;
    let refused = client.transport.call(get("p")).await.expect_err("nobody");
    assert_eq!((refused.code(), refused.reason()), (401, "Unauthorized"));
    assert_eq!(server.seen().len(), 1, "a retry would present the same identity");
    identity.set(Some(pair(&Authority::new("clients").client("n"))));
    server.until("the old connection goes", |server| server.open() == 0).await;
    client.transport.call(get("p")).await.expect("known now");
}

#[tokio::test]
async fn files_are_followed() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let clients = Authority::new("clients");
    let (old, new) = (clients.client("old"), clients.client("new"));
    let (certificate, key) = (server.path("client.crt", &old.0), server.path("client.key", &old.1));
    let user = User { pair: Some((InlineOrFile::File(certificate), InlineOrFile::File(key))), ..User::default() };
    let client = Client::open(TransportConfig::new(server.cluster(), user)).await;
    client.transport.call(get("p")).await.expect("an answer");
    assert_eq!(server.seen()[0].who, leaf(&pair(&old)));
    server.path("client.crt", &new.0);
    server.path("client.key", &new.1);
    client.transport.reload_identity();
    server.until("the old connection goes", |server| server.open() == 0).await;
    client.transport.call(get("p")).await.expect("an answer");
    assert_eq!(server.seen()[1].who, leaf(&pair(&new)));
}

#[tokio::test]
async fn authorities_that_cannot_be_used_change_nothing() {
    // AC-10-38
    let mut server = Server::start(Settings::default(), |_| json("{}")).await;
    let file = server.path("ca.crt", &server.authority.pem);
    let cluster = Cluster { authorities: Some(InlineOrFile::File(file)), ..server.cluster() };
    let client = Client::open(TransportConfig::new(cluster, User::default())).await;
    client.transport.call(get("p")).await.expect("an answer");
    server.path("ca.crt", "garbage");
    server.cut();
    client.transport.call(get("p")).await.expect("the old ones are believed");
    let other = Authority::new("others");
    server.serve_as(&other).await;
    let error = client.transport.call(get("p").within(Duration::from_secs(2))).await.expect_err("a stranger");
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    server.path("ca.crt", &other.pem);
    until("the good ones are used", || client.transport.is_reachable() || ask_again(&client)).await;
    client.transport.call(get("p")).await.expect("an answer");
}

/// Makes the client send a request; returns false, because the outcome is not known yet.
fn ask_again(client: &Client) -> bool {
    let transport = client.transport.clone();
    tokio::spawn(async move { transport.call(get("p")).await.is_ok() });
    false
}

#[tokio::test]
async fn a_server_that_sends_us_away_is_left() {
    let slow = Arc::new(AtomicBool::new(false));
    let server = Server::start(Settings::default(), answers(&slow)).await;
    let client = server.client().await;
    let under_way = tokio::spawn({
        let transport = client.transport.clone();
        async move { transport.call(get("slow")).await }
    });
    server.until("it is under way", |server| !server.seen().is_empty()).await;
    server.go_away();
    for name in ["a", "b"] {
        let post = Call::create(Resource::PODS, "ns", "{}").query("name", name);
        client.transport.call(post).await.expect("on another connection");
    }
    slow.store(true, Ordering::SeqCst);
    assert!(under_way.await.expect("no panic").is_ok(), "what was under way is finished");
    let connections: Vec<u64> = server.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!((connections[0], connections.last()), (1, Some(&2)));
    let posts = server.seen().iter().filter(|seen| seen.method == "POST").count();
    assert_eq!(posts, 2, "none was made twice");
}

#[tokio::test]
async fn unverified_servers_receive_no_request() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let stranger = InlineOrFile::Text(Authority::new("others").pem.into_bytes());
    let cluster = Cluster { authorities: Some(stranger), ..server.cluster() };
    let user = User { token: "secret".into(), ..User::default() };
    let client = Client::open(TransportConfig::new(cluster.clone(), user.clone())).await;
    let error = client.transport.call(get("p")).await.expect_err("not believed");
    assert!(matches!(&error, ApiError::Unreachable(text) if text.starts_with("tls: ")), "{error:?}");
    assert_eq!(server.seen().len(), 0);
    let named = Cluster { tls_server_name: "localhost".into(), ..server.cluster() };
    Client::open(TransportConfig::new(named, user.clone())).await.transport.call(get("p")).await.expect("by its name");
    let wrong = Cluster { tls_server_name: "other".into(), ..server.cluster() };
    let result = Client::open(TransportConfig::new(wrong, user.clone())).await.transport.call(get("p")).await;
    assert!(result.expect_err("another name").to_string().contains("tls: "));
    let careless = Cluster { insecure_skip_tls_verify: true, authorities: None, ..cluster };
    Client::open(TransportConfig::new(careless, user)).await.transport.call(get("p")).await.expect("anybody will do");
    let heartbeat = Call::get(Resource::NODES, "", "n").on(RequestClass::Heartbeat);
    assert!(client.transport.call(heartbeat).await.is_err());
}
