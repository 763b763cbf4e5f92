//! Static pods of a misbehaving URL: running pods continue, and passwords are not logged.
//!
//! The log names the URL and what is wrong with it.

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::{
    misbehaving_server::{Answer, Server, ok},
    process::{Agent, container, manifest, skips},
};

fn list(pods: &[Value]) -> Answer {
    ok(json!({"apiVersion": "v1", "kind": "PodList", "items": pods}).to_string())
}

/// Running containers with their start times.
async fn running(agent: &Agent) -> Vec<Value> {
    let mut all = Vec::new();
    for name in ["file", "a", "b"] {
        all.push(container(&agent.until_ready(name).await, "main").clone());
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_server_costs_nothing_that_runs() {
    if skips("a_bad_server_costs_nothing_that_runs") {
        return;
    }
    let good = list(&[manifest("a"), manifest("b")]);
    let server = Server::start([good.clone()]).await;
    let url = server.url();
    let shown = url.replace("//", "//me:***@");
    let mut nameless = manifest("b");
    nameless["spec"]["containers"][0]["image"] = "".into();
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({
        "staticPodURL": url.replace("//", "//me:sec%2Fret@"),
        "staticPodURLHeader": {"X-Secret": ["sec%2Fret"]},
        "httpCheckFrequency": "100ms",
        "logging": {"verbosity": 5},
    }));
    home.put_pod(&manifest("file"));
    let agent = home.start().await;
    let before = running(&agent).await;

    let rows = [
        (Answer::Plain(500, "x".to_owned()), format!("{shown}: 500 Internal Server Error")),
        (Answer::Garbage, format!("Get \"{url}\": client error")),
        (Answer::Endless, format!("{url}: response exceeds the size limit")),
        (ok("kind: ["), format!("{shown}: received 'kind: [', but couldn't parse as single (error converting YAML")),
        (
            list(&[manifest("a"), nameless]),
            format!("{shown}: pod \"b\": invalid pod: [spec.containers[0].image: Required"),
        ),
        (
            Answer::Redirect("ftp://nowhere/"),
            format!("Get \"{url}\": failed to parse Location header \"ftp://nowhere/\""),
        ),
        (Answer::Hang, format!("Get \"{shown}\": request canceled: no complete answer within 10s")),
    ];
    for (answer, text) in rows {
        server.then(answer);
        server.then(good.clone());
        agent.until(&text, async || agent.log().replace("\\\"", "\"").contains(&text)).await;
    }
    // A redirect loop fails only while it lasts.
    for _ in 0..10 {
        server.then(Answer::Redirect("/again"));
    }
    server.then(good.clone());
    agent.until_log("stopped after 10 redirects").await;
    server.then(list(&[manifest("a"), manifest("b"), manifest("c")]));
    agent.until_ready("c").await;
    assert_eq!(running(&agent).await, before, "nothing was touched");
    assert!(!agent.log().contains("sec%2Fret"), "a password in the log");
    assert!(runtime.cri.violations().is_empty());
}
