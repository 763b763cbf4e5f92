//! Debian's Prometheus on the main port with TLS and token review, and promtool on every metrics page.

use std::{collections::BTreeMap, path::Path};

use berth::certificates::{Authority, CertificatePairPaths, Validity};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::node::{Node, lasting};
use berth_testkit::{
    api_server::{ApiServer, reviews::TOKENS},
    prometheus::{Prometheus, lint},
    reservation,
};

/// Every metrics page.
pub const PAGES: [&str; 5] = ["/metrics", "/metrics/cadvisor", "/metrics/probes", "/metrics/resource", "/metrics/slis"];
/// User name of the scraper.
const SCRAPER: &str = "system:serviceaccount:monitoring:prometheus";

/// A node with webhook authentication on its main port, and a Prometheus that scrapes it.
pub struct ScrapedNode {
    pub prometheus: Prometheus,
    pub node: Node,
    pub api: ApiServer,
    _files: tempfile::TempDir,
}

impl ScrapedNode {
    /// Starts both; `None`, with a report, if the test is skipped.
    pub async fn start(test: &str, prepare: impl FnOnce(&ApiServer)) -> Option<Self> {
        let (api, files) = (ApiServer::start().await, tempfile::tempdir().expect("a folder"));
        api.accept_token("good", SCRAPER, &["system:serviceaccounts"]);
        api.accept_token("idle", "idle", &[]);
        api.allow(SCRAPER, "get", "metrics");
        prepare(&api);
        let [port] = reservation::free_ports();
        let fields = guarded(files.path(), port);
        let flags = [format!("--kubeconfig={}", api.kubeconfig().display())];
        let node = Node::with_flags(test, fields, &flags).await?;
        let prometheus = Prometheus::start(test, files.path(), &scrapes(files.path(), port)).await?;
        Some(Self { prometheus, node, api, _files: files })
    }
}

/// Creates certificates in the directory; returns the configuration that uses them.
fn guarded(folder: &Path, port: u16) -> Value {
    let valid = Validity::days(Timestamp::now(), 2);
    let authority = Authority::create("test", valid).expect("an authority");
    let serving = authority.serving("node", &["127.0.0.1".to_owned()], valid).expect("a certificate");
    let server = CertificatePairPaths::of(folder, "server");
    server.write(&serving).expect("written");
    std::fs::write(folder.join("ca.crt"), &authority.own().certificate).expect("written");
    json!({
        "enableServer": true,
        "port": port,
        "tlsCertFile": server.certificate,
        "tlsPrivateKeyFile": server.key,
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}},
        "authorization": {"mode": "Webhook"},
    })
}

/// Scrape configuration of `dashboards/README.md`, with a shorter interval; and two unauthorized jobs.
fn scrapes(folder: &Path, port: u16) -> Value {
    let job = |name: &str, path: &str, token: &str| {
        std::fs::write(folder.join(token), token).expect("written");
        json!({
            "job_name": name,
            "scheme": "https",
            "metrics_path": path,
            "authorization": {"credentials_file": folder.join(token)},
            "tls_config": {"ca_file": folder.join("ca.crt")},
            "static_configs": [{"targets": [format!("127.0.0.1:{port}")], "labels": {"cluster": "test"}}],
            "relabel_configs": [
                {"source_labels": ["__metrics_path__"], "target_label": "metrics_path"},
                {"target_label": "job", "replacement": name.split(' ').next()},
            ],
        })
    };
    let mut jobs: Vec<Value> = PAGES.iter().map(|path| job(&format!("kubelet {path}"), path, "good")).collect();
    jobs.extend([job("stranger", "/metrics", "unknown"), job("idle", "/metrics", "idle")]);
    json!({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs})
}

/// Scrape error of a job, as soon as it is known.
async fn refusal(site: &ScrapedNode, job: &str) -> String {
    let error = async || {
        let targets = site.prometheus.targets().await;
        let target = targets.iter().find(|target| target["labels"]["job"] == job).cloned().expect("it is scraped");
        target["lastError"].as_str().unwrap_or_default().to_owned()
    };
    site.node.agent.until(&format!("{job} is refused"), async || !error().await.is_empty()).await;
    error().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scraper_with_a_token_reads_every_page() {
    let test = "a_scraper_with_a_token_reads_every_page";
    let Some(site) = ScrapedNode::start(test, |_| ()).await else { return };
    let pod = site.node.run(&lasting("scraped")).await;
    let up = |page: &str| format!("up{{job=\"kubelet\",metrics_path=\"{page}\"}} == 1");
    let mut expected: BTreeMap<&str, String> = PAGES.iter().map(|page| (*page, up(page))).collect();
    // Each page has a family that only this page has.
    for (page, family) in [
        ("/metrics", "kubelet_running_pods"),
        ("/metrics/cadvisor", "container_last_seen{container=\"main\"}"),
        ("/metrics/resource", "resource_scrape_error == 0"),
        ("/metrics/slis", "kubernetes_healthcheck"),
    ] {
        expected.insert(family, family.replace('{', &format!("{{metrics_path=\"{page}\",")));
    }
    site.prometheus.all_return(&expected).await;
    assert!(refusal(&site, "stranger").await.contains("401 Unauthorized"));
    assert!(refusal(&site, "idle").await.contains("403 Forbidden"));
    let reviewed = |token: &str| {
        let all = site.api.requests(TOKENS);
        all.iter().filter(|review| review.body["spec"]["token"] == token).count()
    };
    // Five pages a second, and one review: its result is cached.
    assert_eq!((reviewed("good"), reviewed("idle")), (1, 1));
    assert!(reviewed("unknown") >= 1);

    // No sample was rejected or overwritten: no duplicate series, no decreasing timestamps, no changed value under one
    // timestamp.
    let log = site.prometheus.log();
    assert!(!log.contains("level=warn") && !log.contains("level=error"), "{log}");
    site.node.remove(&pod).await;
}

/// Names that promtool rejects and dashboards use all the same: the reference spells them so (spec 08 §4.3, §8.2).
/// Everything else must pass.
const DISLIKED: &[(&str, &str)] = &[
    ("kubelet_evented_pleg_connection_error_count", "a counter without `_total`, and `_count` is for histograms"),
    ("kubelet_evented_pleg_connection_success_count", "the same"),
    ("kubelet_pleg_discard_events", "a counter without `_total`"),
    ("cadvisor_version_info", "its labels are in camelCase"),
    ("container_fs_inodes_total", "a gauge with `_total`"),
    ("container_memory_failcnt", "a counter without `_total`"),
    ("kubelet_cpu_manager_exclusive_cpu_allocation_count", "a gauge with `_count`"),
    ("kubelet_topology_manager_admission_duration_ms", "milliseconds"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promtool_reads_every_page() {
    let test = "promtool_reads_every_page";
    let Some(node) = Node::shared(test).await else { return };
    let pod = node.run(&lasting("linted")).await;
    let mut findings = Vec::new();
    for page in PAGES {
        let answer = node.agent.get(page).await.expect("an answer");
        assert_eq!(answer.status, 200, "{page}: {}", answer.body);
        let Some(lines) = lint(test, &answer.body) else { return };
        findings.extend(lines.into_iter().map(|line| format!("{page}: {line}")));
    }
    let is_of = |line: &String, name: &str| line.contains(&format!(": {name} "));
    let is_disliked = |line: &&String| DISLIKED.iter().any(|(name, _)| is_of(line, name));
    let left: Vec<&String> = findings.iter().filter(|line| !is_disliked(line)).collect();
    assert!(left.is_empty(), "{left:#?}");
    let liked = DISLIKED.iter().find(|(name, _)| !findings.iter().any(|line| is_of(line, name)));
    assert_eq!(liked, None, "it need not be excused");
    node.remove(&pod).await;
}
