//! Authentication and authorization on a real agent's main port, by an API server with faults.

use std::time::{Duration, Instant};

use berth::certificates::{Authority, CertificatePairPaths};
use serde_json::json;

use crate::agent::ScriptedServer;
use berth_testkit::{
    api_server::{
        ApiServer, SimpleFault,
        reviews::{ACCESSES, TOKENS},
    },
    main_port::MainPort,
    process::{Agent, Home, NODE, skips},
};

/// An agent with an API server for webhook authentication and authorization.
struct Cluster {
    api: ApiServer,
    port: MainPort,
    agent: Agent,
    _runtime: ScriptedServer,
}

impl Cluster {
    async fn new(change: impl FnOnce(Home) -> Home) -> Self {
        let (api, port, runtime) = (ApiServer::start().await, MainPort::new(), ScriptedServer::new().await);
        let kubeconfig = format!("--kubeconfig={}", api.kubeconfig().display());
        let home = change(runtime.home().with(port.webhook_fields()).flag(kubeconfig));
        let agent = home.start().await;
        port.open().await;
        Self { api, port, agent, _runtime: runtime }
    }

    fn asked(&self, path: &str) -> usize {
        self.api.requests(path).len()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_decides_who_reads_what() {
    if skips("an_api_server_decides_who_reads_what") {
        return;
    }
    // AC-04-4, AC-04-5, AC-04-6
    let cluster = Cluster::new(|home| home).await;
    let (api, port) = (&cluster.api, &cluster.port);
    api.accept_token("scraper", "prometheus", &["monitoring"]);
    api.accept_token("nobody", "tom", &[]);
    api.allow("prometheus", "get", "metrics");
    api.allow("prometheus", "get", "proxy");

    let page = port.curl_as("scraper", "/metrics").await;
    assert!(page.status == 200 && page.body.contains("kubelet_node_name"), "{page:?}");
    let review = &api.requests(ACCESSES)[0].body["spec"];
    let attributes =
        json!({"verb": "get", "version": "v1", "resource": "nodes", "subresource": "metrics", "name": NODE});
    assert_eq!(review["resourceAttributes"], attributes);
    assert_eq!((&review["user"], &review["uid"]), (&json!("prometheus"), &json!("uid-prometheus")));
    assert_eq!(review["groups"], json!(["monitoring", "system:authenticated"]));
    assert_eq!(review["extra"], json!({"seen": ["yes"]}));

    // The second subresource is reviewed if the first is not sufficient.
    assert_eq!(port.curl_as("scraper", "/configz").await.status, 200);
    let asked: Vec<_> =
        api.requests(ACCESSES).iter().map(|r| r.body["spec"]["resourceAttributes"]["subresource"].clone()).collect();
    assert_eq!(asked, ["metrics", "configz", "proxy"]);

    let refused = port.curl_as("nobody", "/healthz").await;
    let text = "Forbidden (user=tom, verb=get, resource=nodes, subresource(s)=[healthz proxy])\n";
    assert_eq!((refused.status, refused.body.as_str()), (403, text));
    assert!(refused.head.contains("content-type: text/plain; charset=utf-8") && !refused.head.contains("nosniff"));
    assert!(refused.head.contains("x-node-agent-error: forbidden"), "{}", refused.head);

    // Results are cached.
    let before = (cluster.asked(TOKENS), cluster.asked(ACCESSES));
    for _ in 0..3 {
        assert_eq!(port.curl_as("scraper", "/metrics").await.status, 200);
        assert_eq!(port.curl_as("nobody", "/healthz").await.status, 403);
    }
    assert_eq!((cluster.asked(TOKENS), cluster.asked(ACCESSES)), before);

    let stranger = port.curl("/pods", &[]).await;
    assert_eq!((stranger.status, stranger.body.as_str()), (401, "Unauthorized"));
    assert!(!stranger.head.contains("www-authenticate"), "{}", stranger.head);
    for (header, status) in [("Authorization: Basic c2NyYXBlcg==", 401), ("Authorization: bearer scraper", 200)] {
        assert_eq!(port.curl("/metrics", &["-H", header]).await.status, status, "{header}");
    }
    // A certificate of an unknown CA does not invalidate a valid token (AC-04-18, AC-04-19).
    let foreign = Authority::create("foreign", MainPort::valid()).expect("an authority");
    let files = CertificatePairPaths::of(&port.path(""), "mallory");
    files.write(&foreign.client("mallory", &["system:masters"], MainPort::valid()).expect("issued")).expect("written");
    let (certificate, key) = (files.certificate.display().to_string(), files.key.display().to_string());
    let with = ["--cert", &certificate, "--key", &key];
    assert_eq!(port.curl("/metrics", &with).await.status, 401);
    let both = [&with[..], &["-H", "Authorization: Bearer scraper"]].concat();
    assert_eq!(port.curl("/metrics", &both).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reviewers_that_hang_block_no_other_request() {
    if skips("reviewers_that_hang_block_no_other_request") {
        return;
    }
    let cluster = Cluster::new(|home| home).await;
    let (api, port) = (&cluster.api, &cluster.port);
    api.accept_token("good", "kate", &[]);
    api.accept_token("slow", "kate", &[]);
    api.allow("kate", "get", "metrics");
    api.allow("kate", "get", "healthz");
    assert_eq!(port.curl_as("good", "/metrics").await.status, 200);
    api.trouble(TOKENS, [SimpleFault::Hang]);
    api.trouble(ACCESSES, [SimpleFault::Hang]);
    let begun = Instant::now();
    // An access review that times out is an error; a token review that times out leaves the caller unauthenticated.
    let hung = async { tokio::join!(port.curl_as("slow", "/metrics"), port.curl_as("good", "/healthz")) };
    let others = async {
        for _ in 0..20 {
            assert_eq!(port.curl_as("good", "/metrics").await.status, 200);
            assert_eq!(port.curl("/nope", &[]).await.status, 404);
        }
        begun.elapsed()
    };
    let ((token, access), others) = tokio::join!(hung, others);
    assert!(others < Duration::from_secs(9), "{others:?}");
    assert_eq!((token.status, token.body.as_str()), (401, "Unauthorized"));
    let text = "Authorization error (user=kate, verb=get, resource=nodes, subresource=healthz)";
    assert_eq!((access.status, access.body.as_str()), (500, text));
    assert!(access.head.contains("x-node-agent-error: authorization-failed"), "{}", access.head);
    assert!(begun.elapsed() >= Duration::from_secs(9) && begun.elapsed() < Duration::from_secs(35));
    // Neither result is cached.
    assert_eq!(port.curl_as("slow", "/metrics").await.status, 200);
    assert_eq!(port.curl_as("good", "/healthz").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invented_tokens_are_not_the_api_servers_work() {
    if skips("invented_tokens_are_not_the_api_servers_work") {
        return;
    }
    // The attack of spec 04 §10 "bad-token amplification".
    let cluster = Cluster::new(|home| home).await;
    let (api, port) = (&cluster.api, &cluster.port);
    api.accept_token("good", "kate", &[]);
    api.allow("kate", "get", "metrics");
    assert_eq!(port.curl_as("good", "/metrics").await.status, 200);
    let before = cluster.asked(TOKENS);
    // One token, repeated: one review.
    let same = futures::future::join_all((0..10).map(|_| port.curl_as("worn", "/metrics"))).await;
    assert!(same.iter().all(|answer| answer.status == 401), "{same:?}");
    assert_eq!(cluster.asked(TOKENS) - before, 1);
    // New tokens all the time: limited to the rate of one address.
    let block = |n| {
        format!(
            "url = \"https://127.0.0.1:{}/metrics\"\nheader = \"Authorization: Bearer x{n}\"\noutput = \"/dev/null\"\n\
             write-out = \"%{{http_code}}\\n\"\ninsecure\nsilent\n",
            port.port
        )
    };
    let blocks: Vec<String> = (0..400).map(block).collect();
    let config = port.path("curl.config");
    std::fs::write(&config, blocks.join("next\n")).expect("written");
    let begun = Instant::now();
    let flood = tokio::process::Command::new("curl").arg("-K").arg(&config).output().await.expect("curl ends");
    let codes = String::from_utf8_lossy(&flood.stdout).into_owned();
    let count = |code: &str| codes.lines().filter(|line| *line == code).count();
    assert!(count("429") > 100 && count("401") + count("429") >= 399, "{} {}", count("401"), count("429"));
    let reviews = cluster.asked(TOKENS) - before - 1;
    let allowed = 20 + usize::try_from(begun.elapsed().as_millis() / 100).expect("small") + 1;
    assert!(reviews <= allowed && reviews <= count("401") + 1, "{reviews} of {allowed}");
    // A caller with a valid token is not affected.
    assert_eq!(port.curl_as("good", "/metrics").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_survive_an_api_server_that_is_gone_where_that_is_wanted() {
    if skips("metrics_survive_an_api_server_that_is_gone_where_that_is_wanted") {
        return;
    }
    let fields = json!({"authorization": {"mode": "Webhook", "webhook": {"cacheAuthorizedTTL": "1s"}}});
    for wanted in [false, true] {
        let flag = format!("--stale-authorization={wanted}");
        let mut cluster = Cluster::new(|home| home.with(fields.clone()).flag(flag)).await;
        cluster.api.accept_token("good", "kate", &[]);
        for subresource in ["metrics", "stats"] {
            cluster.api.allow("kate", "get", subresource);
        }
        assert_eq!(cluster.port.curl_as("good", "/metrics").await.status, 200);
        assert_eq!(cluster.port.curl_as("good", "/stats/summary").await.status, 200);
        cluster.api.vanish().await;
        cluster
            .agent
            .until("the verdicts are old", async || cluster.port.curl_as("good", "/stats/summary").await.status == 500)
            .await;
        let metrics = cluster.port.curl_as("good", "/metrics").await.status;
        assert_eq!(metrics, if wanted { 200 } else { 500 }, "{wanted}");
        assert_eq!(cluster.port.curl_as("other", "/metrics").await.status, 401, "{wanted}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_is_queried_within_the_configured_rate() {
    if skips("the_api_server_is_queried_within_the_configured_rate") {
        return;
    }
    let cluster = Cluster::new(|home| home.with(json!({"kubeAPIQPS": 2, "kubeAPIBurst": 1}))).await;
    cluster.api.accept_token("good", "kate", &[]);
    cluster.api.allow("kate", "get", "metrics");
    let begun = Instant::now();
    // A token and three accesses: the first review at once, each other half a second later.
    assert_eq!(cluster.port.curl_as("good", "/metrics").await.status, 200);
    assert_eq!(cluster.port.curl_as("good", "/pods").await.status, 403);
    assert_eq!((cluster.asked(TOKENS), cluster.asked(ACCESSES)), (1, 3));
    assert!(begun.elapsed() >= Duration::from_millis(1450), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_authority_of_streams_is_more_than_reading() {
    if skips("the_authority_of_streams_is_more_than_reading") {
        return;
    }
    // AC-04-24, and the flag that restores the reference's behavior.
    for (flag, refused) in [("--streaming-requires-create=true", true), ("--streaming-requires-create=false", false)] {
        let cluster = Cluster::new(|home| home.flag(flag)).await;
        cluster.api.accept_token("good", "kate", &[]);
        cluster.api.allow("kate", "get", "proxy");
        let upgrade = ["-H", "Authorization: Bearer good", "-H", "Connection: Upgrade", "-H", "Upgrade: websocket"];
        let answer = cluster.port.curl("/exec/n/p/c?command=id&output=1", &upgrade).await;
        assert_eq!(answer.status == 403, refused, "{flag}: {answer:?}");
        assert!(refused || answer.body == "pod does not exist", "{flag}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_prove_nothing() {
    if skips("certificates_that_prove_nothing") {
        return;
    }
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
    let (port, runtime) = (MainPort::new(), ScriptedServer::new().await);
    let home = runtime.home().with(port.fields());
    let agent = home.start().await;
    port.open().await;
    assert_eq!(port.curl_with(&port.client("kate", &["dev"]), "/pods").await.status, 200);
    let own = port.authority.own();
    let issuer =
        Issuer::from_ca_cert_pem(&own.certificate, KeyPair::from_pem(&own.key).expect("a key")).expect("an issuer");
    let issue = |name: &str, usage: ExtendedKeyUsagePurpose, years: (i32, i32)| {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let certificate = params.signed_by(&key, &issuer).expect("issued").pem();
        let files = CertificatePairPaths::of(&port.path(""), name);
        files.write(&berth::certificates::CertificatePair { certificate, key: key.serialize_pem() }).expect("written");
        files
    };
    let client = || ExtendedKeyUsagePurpose::ClientAuth;
    for (name, usage, years, status) in [
        ("good", client(), (2020, 2090), 200),
        ("expired", client(), (2020, 2021), 401),
        ("not-yet", client(), (2080, 2090), 401),
        ("server-only", ExtendedKeyUsagePurpose::ServerAuth, (2020, 2090), 401),
    ] {
        let files = issue(name, usage, years);
        let answer = port.curl_with(&files, "/pods").await;
        assert_eq!(answer.status, status, "{name}: {answer:?}");
        if status == 401 {
            // Rejected with a response, not in the handshake: a token beside it could still be valid.
            assert_eq!(answer.body, "Unauthorized", "{name}");
        }
    }
    assert!(agent.log_end().len() > 1);
}
