//! Requests as the server receives them, and responses as the client interprets them.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use super::server::{Client, Reply, Server, Settings, json, status};
use crate::{
    api::{ApiClient, ApiError, Call, RequestClass, Resource, Verb},
    transport::*,
};

#[tokio::test]
async fn a_call_arrives_as_the_reference_sends_it() {
    let server = Server::start(Settings::default(), |_| json(r#"{"kind":"Node"}"#)).await;
    let user = User {
        token: "secret".into(),
        acting: Impersonation { user: "other".into(), ..Impersonation::default() },
        ..User::default()
    };
    let mut config =
        TransportConfig::new(server.cluster(), user).with_user_agent(user_agent("berth", "v1.36.2", "abcdef0123"));
    config.cluster.server.push_str("/prefix/");
    let client = Client::open(config).await;
    assert!((client.transport.is_reachable(), client.transport.last_contact()) == (false, None));
    let call =
        Call::patch(Resource::NODES, "", "n", "{}").sub("status").on(RequestClass::Heartbeat).query("timeout", "10s");
    let answer = client.transport.call(call).await.expect("an answer");
    assert_eq!(&answer[..], br#"{"kind":"Node"}"#);
    let seen = server.seen().remove(0);
    assert_eq!((seen.method.as_str(), seen.target.as_str()), ("PATCH", "/prefix/api/v1/nodes/n/status?timeout=10s"));
    let header =
        |name: &str| seen.headers.get(name).map(|value| value.to_str().expect("text").to_owned()).unwrap_or_default();
    for (name, expected) in [
        ("user-agent", "kubelet/v1.36.2 (linux/"),
        ("accept", "application/json"),
        ("accept-encoding", "gzip"),
        ("content-type", "application/strategic-merge-patch+json"),
        ("authorization", "Bearer secret"),
        ("impersonate-user", "other"),
    ] {
        assert!(header(name).starts_with(expected), "{name}: {}", header(name));
    }
    assert!(client.transport.is_reachable() && client.transport.last_contact().is_some());
    assert_eq!(client.metric("rest_client_requests_total", &["200", "PATCH"]), 1.0);
    assert_eq!(client.metric("berth_api_connections", &["beat"]), 1.0);
    assert_eq!(client.metric("berth_api_connections", &["unary"]), 0.0);
}

#[tokio::test]
async fn error_responses_carry_their_reason() {
    let server = Server::start(Settings::default(), |seen| match seen.target.as_str() {
        "/api/v1/nodes/gone" => Reply::Full(
            410,
            Vec::new(),
            br#"{"kind":"Status","status":"Failure","reason":"Expired","message":"old"}"#.to_vec(),
        ),
        "/api/v1/nodes/proto" => {
            let kind = "application/vnd.kubernetes.protobuf".to_owned();
            Reply::Full(200, vec![("content-type", kind)], b"k8s\0".to_vec())
        }
        "/api/v1/nodes/large" => Reply::Full(200, Vec::new(), vec![b'x'; (8 << 20) + 1]),
        _ => status(403),
    })
    .await;
    let client = server.client().await;
    let ask = async |name: &str| client.transport.call(Call::get(Resource::NODES, "", name)).await.expect_err(name);
    let gone = ask("gone").await;
    assert_eq!((gone.code(), gone.is_gone(), gone.to_string().as_str()), (410, true, "old"));
    assert!(ask("other").await.is_forbidden());
    // AC-10-44
    let proto = ask("proto").await;
    assert_eq!(proto, ApiError::Malformed("unsupported content type: application/vnd.kubernetes.protobuf".into()));
    assert!(ask("large").await.to_string().starts_with("response exceeds"));
    assert_eq!(client.metric("rest_client_requests_total", &["410", "GET"]), 1.0);
    assert_eq!(server.made(), 1);
}

#[tokio::test]
async fn a_server_that_asks_for_patience_gets_it() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(Settings::default(), move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::Full(
            429,
            vec![("retry-after", "1".to_owned())],
            b"Too many requests, please try again later.\n".to_vec(),
        ),
        1 => status(503),
        _ => json("{}"),
    })
    .await;
    let client = server.client().await;
    let begun = Instant::now();
    // AC-10-35: a text body; retried when the server requested it. AC-10-36: without `Retry-After`, not retried.
    let patch = Call::patch(Resource::PODS, "ns", "p", "{}").sub("status");
    let error = client.transport.call(patch.clone()).await.expect_err("no promise");
    assert_eq!((error.code(), server.seen().len()), (503, 2));
    assert!((1.0..2.5).contains(&begun.elapsed().as_secs_f64()), "{:?}", begun.elapsed());
    assert_eq!(client.metric("rest_client_request_retries_total", &["429", "PATCH"]), 1.0);
    assert!(client.transport.call(patch.once()).await.is_ok());
}

#[tokio::test]
async fn only_what_reads_is_asked_again_when_the_connection_is_lost() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(Settings::default(), move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 | 1 => Reply::Cut,
        _ => json("{}"),
    })
    .await;
    let client = server.client().await;
    // AC-10-26: the caller of a delete decides about retries.
    let lost = client.transport.call(Call::delete_now(Resource::PODS, "ns", "p", "u")).await.expect_err("cut");
    assert!(matches!(lost, ApiError::Lost(_)), "{lost:?}");
    assert_eq!(server.seen().len(), 1);
    client.transport.call(Call::get(Resource::PODS, "ns", "p")).await.expect("at last");
    assert_eq!(server.seen().len(), 3);
    assert_eq!(client.metric("rest_client_requests_total", &["<error>", "DELETE"]), 1.0);
}

#[tokio::test]
async fn a_deadline_is_one() {
    let server = Server::start(Settings::default(), |_| Reply::Hang).await;
    let client = server.client().await;
    let limit = Duration::from_secs(1);
    let late = client.transport.call(Call::get(Resource::PODS, "ns", "p").within(limit)).await;
    assert_eq!(late, Err(ApiError::Timeout(limit)));
    let watch = Call::new(Verb::Watch, Resource::PODS, "", "").within(limit);
    assert_eq!(client.transport.watch(watch).await.err(), Some(ApiError::Timeout(limit)));
    assert_eq!(server.open(), 2, "the connections are fine");
}

#[tokio::test]
async fn a_watch_begins_when_it_can() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(Settings::default(), move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::Full(429, vec![("retry-after", "1".to_owned())], b"Too many requests\n".to_vec()),
        1 => Reply::Cut,
        2 => json("{\"type\":\"ADDED\"}\n"),
        3 => status(500),
        _ => Reply::Cut,
    })
    .await;
    let client = server.client().await;
    let call = Call::new(Verb::Watch, Resource::PODS, "", "").query("resourceVersion", "7").query("watch", "true");
    // AC-10-13: later, from the same version; and retried when the connection is lost.
    let begun = Instant::now();
    let mut watch = client.transport.watch(call.clone()).await.expect("it begins");
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(&watch.next().await.expect("an event").expect("an event")[..], b"{\"type\":\"ADDED\"}");
    assert_eq!(watch.next().await, None);
    let targets: Vec<String> = server.seen().into_iter().map(|seen| seen.target).collect();
    assert_eq!(targets, ["/api/v1/pods?resourceVersion=7&watch=true"; 3]);
    let error = client.transport.watch(call.clone()).await.err().expect("no promise");
    assert_eq!(error.code(), 500);
    let mut empty = client.transport.watch(call.within(Duration::from_secs(1))).await.expect("an empty one");
    assert_eq!(empty.next().await, None, "what is lost each time is no error");
}

#[tokio::test]
async fn a_program_that_is_not_believed_is_asked_again() {
    let server = Server::start(Settings::default(), |seen| {
        let authorization = seen.headers.get("authorization").and_then(|value| value.to_str().ok());
        if authorization == Some("Bearer word1") { json("{}") } else { status(401) }
    })
    .await;
    let runs = server.path("runs", "");
    let script = format!(
        r#"printf '{{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{{"token":"word%d"}}}}' "$(wc -l < {0})"; echo run >> {0}"#,
        runs.display()
    );
    let exec = Exec {
        command: "sh".into(),
        args: Some(vec!["-c".into(), script]),
        api_version: "client.authentication.k8s.io/v1".into(),
        interactive_mode: Some("Never".into()),
        ..Exec::default()
    };
    let client =
        Client::open(TransportConfig::new(server.cluster(), User { exec: Some(exec), ..User::default() })).await;
    let ask = || client.transport.call(Call::get(Resource::PODS, "ns", "p"));
    assert_eq!(ask().await.expect_err("word0").code(), 401);
    ask().await.expect("word1");
    ask().await.expect("word1, which is known");
    assert_eq!(std::fs::read_to_string(&runs).expect("there").lines().count(), 2);
}
