//! What operators look at, proven on a running agent: Debian's Prometheus scrapes it, and every
//! expression of the dashboard returns data. Skipped by name where there is no `prometheus`.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    Ground,
    kit::{
        process::{Agent, Home, PATIENCE, free_ports, get, manifest, manifest_of, skips},
        scripted::{Behaviour, Fault},
    },
};

/// Killed when the test ends.
struct Prometheus {
    child: Child,
    port: u16,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// Scrapes the read-only port of an agent every second; `None` where there is no Prometheus.
    async fn start(home: &Home, paths: &[&str]) -> Option<Self> {
        let [port] = free_ports();
        let config = home.path().join("prometheus.yaml");
        std::fs::write(&config, scrapes(home.read_only_port(), paths).to_string()).expect("written");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", home.path().join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => panic!("prometheus: {error}"),
        };
        let started = Self { child, port };
        let deadline = Instant::now() + PATIENCE;
        while get(port, "/-/ready").await.is_none_or(|answer| answer.status != 200) {
            assert!(Instant::now() < deadline, "prometheus is not ready");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(started)
    }

    /// How many series an expression returns now.
    async fn series(&self, expression: &str) -> Result<usize, String> {
        let query: String = form_urlencoded::Serializer::new(String::new()).append_pair("query", expression).finish();
        let answer = get(self.port, &format!("/api/v1/query?{query}")).await.ok_or("no answer")?;
        let answer: Value = serde_json::from_str(&answer.body).map_err(|e| format!("{e}: {}", answer.body))?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"]["result"].as_array().map_or(0, Vec::len)),
            _ => Err(format!("{expression}: {answer}")),
        }
    }

    /// Waits until all expressions return data; tells those that do not.
    async fn all_return(&self, expressions: &BTreeMap<String, String>) {
        let deadline = Instant::now() + PATIENCE;
        let mut left: Vec<(&String, &String)> = expressions.iter().collect();
        loop {
            let mut empty = Vec::new();
            for (panel, expression) in left {
                if self.series(expression).await.expect("it can be evaluated") == 0 {
                    empty.push((panel, expression));
                }
            }
            if empty.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "no data:\n{empty:#?}");
            left = empty;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// As dashboards/README.md tells operators to scrape, only faster.
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

/// Every expression of the dashboard, its variables filled in, by row, panel and letter.
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

/// A life in which everything the dashboard shows happens.
async fn lively(ground: &Ground, home: &Home) -> Agent {
    ground.cri.behave("done-test-node/main", [Behaviour::exits(0, Duration::ZERO)]);
    let refusal = Fault::Error(tonic::Code::Unknown, "no".into());
    ground.cri.fault("create_container", "unlucky", refusal, Some(1));
    home.put_pod(&manifest("one"));
    home.start().await
}

/// Pods come while the scrapes go on: a rate wants something that moves.
async fn stir(home: &Home, agent: &Agent) {
    home.put_pod(&manifest_of("done", json!({"containers": [{"name": "main"}], "restartPolicy": "Never"})));
    home.put_pod(&manifest_of("pulls", json!({"containers": [{"name": "main", "image": "example.com/new:1"}]})));
    home.put_pod(&manifest("unlucky"));
    agent.until_ready("pulls").await;
    agent.until_ready("unlucky").await;
    let _ = agent.get("/healthz").await; // the indicators move with it
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_panel_of_the_dashboard_has_data() {
    // AC-08-22
    if skips("every_panel_of_the_dashboard_has_data") {
        return;
    }
    let ground = Ground::new().await;
    let home = ground.home();
    let agent = lively(&ground, &home).await;
    agent.until_ready("one").await;
    let Some(prometheus) = Prometheus::start(&home, &["/metrics", "/metrics/slis"]).await else {
        println!("skipped every_panel_of_the_dashboard_has_data: prometheus is not installed");
        return;
    };
    let scraped = BTreeMap::from([("the first scrape".to_owned(), "up{metrics_path=\"/metrics\"} == 1".to_owned())]);
    prometheus.all_return(&scraped).await;
    stir(&home, &agent).await;
    prometheus.all_return(&dashboard()).await;
}
