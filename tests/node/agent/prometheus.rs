//! Prometheus and dashboard on a running agent: every dashboard expression returns data.
//!
//! Debian's Prometheus scrapes the agent. A test reports its name and is skipped without `prometheus`.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{Agent, Home, manifest, manifest_of, skips},
    prometheus::Prometheus,
    scripted_cri::{Behaviour, Fault},
};

/// Scrape configuration of dashboards/README.md, with a shorter interval.
fn scrapes(port: u16, paths: &[&str]) -> Value {
    let one = |path: &&str| {
        json!({
            "job_name": path,
            "metrics_path": path,
            "static_configs": [{"targets": [format!("127.0.0.1:{port}")], "labels": {"cluster": "test"}}],
            "relabel_configs": [
                {"source_labels": ["__metrics_path__"], "target_label": "metrics_path"},
                {"target_label": "job", "replacement": "kubelet"},
            ],
        })
    };
    let configs: Vec<Value> = paths.iter().map(one).collect();
    json!({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": configs})
}

/// Every expression of the dashboard with its variables replaced, by row, panel, and letter.
fn dashboard() -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards/node-agent.json");
    let document: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("readable")).expect("JSON");
    let mut found = BTreeMap::new();
    for panel in document["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let filled = [("$cluster", "test"), ("$instance", ".*"), ("$__rate_interval", "20s"), ("$__range", "5m")]
                .iter()
                .fold(target["expr"].as_str().expect("an expression").to_owned(), |e, (v, is)| e.replace(v, is));
            assert!(!filled.contains('$'), "{filled}");
            let name = format!("{} {} {}", panel["id"], panel["title"], target["refId"]);
            found.insert(name, filled);
        }
    }
    found
}

/// Starts an agent whose pods cause everything that the dashboard shows.
async fn lively(runtime: &ScriptedServer, home: &Home) -> Agent {
    runtime.cri.behave("done-test-node/main", [Behaviour::exits(0, Duration::ZERO)]);
    let refusal = Fault::Error(tonic::Code::Unknown, "no".into());
    runtime.cri.fault("create_container", "unlucky", refusal, Some(1));
    home.put_pod(&manifest("one"));
    home.start().await
}

/// Adds pods during the scrapes: a rate needs changing counters.
async fn stir(home: &Home, agent: &Agent) {
    home.put_pod(&manifest_of("done", json!({"containers": [{"name": "main"}], "restartPolicy": "Never"})));
    home.put_pod(&manifest_of("pulls", json!({"containers": [{"name": "main", "image": "example.com/new:1"}]})));
    home.put_pod(&manifest("unlucky"));
    agent.until_ready("pulls").await;
    agent.until_ready("unlucky").await;
    let _ = agent.get("/healthz").await; // health checks change the SLI metrics
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_panel_of_the_dashboard_has_data() {
    // AC-08-22
    if skips("every_panel_of_the_dashboard_has_data") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    // A threshold that exists and is never met.
    let home = runtime.home().with(json!({"evictionHard": {"memory.available": "1Mi"}}));
    let agent = lively(&runtime, &home).await;
    agent.until_ready("one").await;
    let scrapes = scrapes(home.read_only_port(), &["/metrics", "/metrics/slis"]);
    let test = "every_panel_of_the_dashboard_has_data";
    let Some(prometheus) = Prometheus::start(test, home.path(), &scrapes).await else { return };
    let scraped = BTreeMap::from([("the first scrape".to_owned(), "up{metrics_path=\"/metrics\"} == 1".to_owned())]);
    prometheus.all_return(&scraped).await;
    stir(&home, &agent).await;
    prometheus.all_return(&dashboard()).await;
}
