//! Statistics pages while parts of the machine do not respond: fields are missing, pages are not.

use std::time::Duration;

use berth_metrics::StatsSource;
use berth_stats::Form;
use serde_json::Value;

use crate::stats::fixture::{Fixture, pod};
use berth_testkit::scripted_cri::Fault;

async fn summary(house: &Fixture) -> Value {
    let page = house.provider.summary(Form::Full).await.expect("a page");
    serde_json::from_slice(&page).expect("JSON")
}

fn text(page: &[u8]) -> &str {
    std::str::from_utf8(page).expect("text")
}

#[tokio::test]
async fn a_runtime_that_hangs_costs_its_fields() {
    let house = Fixture::new(vec![pod("u1", "web")], None);
    for call in ["list_container_stats", "image_fs_info", "podsandbox_status"] {
        house.cri.fault(call, "", Fault::Hang, None);
    }
    let page = summary(&house).await;
    assert_eq!(page["node"]["nodeName"], "node-1");
    assert!(page["node"]["cpu"]["usageCoreNanoSeconds"].as_u64().is_some_and(|used| used > 0), "{page:#}");
    assert!(page["node"]["fs"]["capacityBytes"].is_u64() && page["node"].get("runtime").is_none(), "{page:#}");
    let container = &page["pods"][0]["containers"][0];
    assert_eq!(container["name"], "main");
    assert!(container.get("rootfs").is_none() && container.get("cpu").is_none(), "{page:#}");
    let page = house.provider.cadvisor_metrics().await;
    assert!(text(&page).contains("\ncontainer_scrape_error 0\n"));
}

#[tokio::test]
async fn processes_are_known_without_all_that_may_hang() {
    let house = Fixture::new(vec![pod("u1", "web")], None);
    for call in ["list_container_stats", "image_fs_info"] {
        house.cri.fault(call, "", Fault::Hang, None);
    }
    let counts = house.provider.processes().await.expect("known");
    let counts: Vec<_> = counts.iter().map(|(pod, count)| (pod.as_str(), *count)).collect();
    assert_eq!(counts, [("u1", Some(0))]);
    assert_eq!((house.cri.count("list_container_stats"), house.cri.count("image_fs_info")), (0, 0), "no runtime call");
}

#[tokio::test]
async fn runtime_stats_replace_missing_cgroups() {
    let house = Fixture::new(vec![pod("u1", "web")], None);
    house.cri.add_running("u1", "web", "main", "c1");
    let page = summary(&house).await;
    let container = &page["pods"][0]["containers"][0];
    assert_eq!(container["cpu"]["usageCoreNanoSeconds"], 1_000_000, "{page:#}");
    assert_eq!((&container["rootfs"]["usedBytes"], &container["rootfs"]["inodesUsed"]), (&24_576.into(), &6.into()));
    assert!(container["rootfs"]["capacityBytes"].as_u64().is_some_and(|size| size > 0), "{page:#}");
    let page = house.provider.resource_metrics().await;
    let line = "container_cpu_usage_seconds_total{container=\"main\",namespace=\"default\",pod=\"web\"} 0.001 ";
    assert!(text(&page).contains(line), "{}", text(&page));
}

#[tokio::test]
async fn a_runtime_can_be_the_source_of_all() {
    // Gate PodAndContainerStatsFromCRI (spec 04b §7.2).
    let mut observed = pod("u1", "web");
    observed.sandboxes[0].id = "c1-sandbox".into();
    observed.containers[0].sandbox = "c1-sandbox".into();
    let house = Fixture::with(vec![observed], None, StatsSource::Runtime);
    house.cri.add_running("u1", "web", "main", "c1");
    let provider = |registry: &berth_metrics::Registry| {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == "kubelet_metrics_provider").expect("there");
        family.get_metric().iter().map(|metric| metric.get_label()[0].value().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(provider(&house.registry), ["cri"]);
    let pod_stats = summary(&house).await["pods"][0].clone();
    assert_eq!(pod_stats["containers"][0]["memory"]["workingSetBytes"], 1 << 20, "{pod_stats:#}");
    assert_eq!(
        pod_stats["cpu"]["usageCoreNanoSeconds"], 1_000_000,
        "values missing of the pod are sums: {pod_stats:#}"
    );
    assert_eq!(house.cri.count("list_podsandbox_stats"), 1);
    let page = house.provider.resource_metrics().await;
    let line = "pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"web\"} 0.001 ";
    assert!(text(&page).contains(line), "{}", text(&page));
}

#[tokio::test]
async fn a_runtime_that_cannot_be_the_source_is_none() {
    let house = Fixture::with(vec![pod("u1", "web")], None, StatsSource::Runtime);
    house.cri.add_running("u1", "web", "main", "c1");
    let unknown = || Fault::Error(tonic::Code::Unimplemented, "unknown method ListPodSandboxStats".into());
    house.cri.fault("list_podsandbox_stats", "", unknown(), Some(1));
    let pod_stats = summary(&house).await["pods"][0].clone();
    assert_eq!(
        pod_stats["containers"][0]["cpu"]["usageCoreNanoSeconds"], 1_000_000,
        "from the list of containers: {pod_stats:#}"
    );

    let house = Fixture::with(vec![pod("u1", "web")], None, StatsSource::Runtime);
    let broken = Fault::Error(tonic::Code::Internal, "broken".into());
    house.cri.fault("list_podsandbox_stats", "", broken, None);
    let error = house.provider.summary(Form::Full).await.expect_err("it fails");
    assert!(error.starts_with("failed to list pod stats: ") && error.contains("broken"), "{error}");
}

#[tokio::test]
async fn a_source_that_fails_is_one_line_of_metrics() {
    // AC-04b-M9, AC-08-16
    let house = Fixture::new(Vec::new(), None);
    *house.shown.0.lock().expect("whole") = None;
    let page = house.provider.resource_metrics().await;
    let values: Vec<&str> = text(&page).lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(values, ["resource_scrape_error 1"]);
    let error = house.provider.summary(Form::Short).await.expect_err("nothing to tell");
    assert_eq!(error, "failed to list pod stats: the runtime is down");
    let page = house.provider.cadvisor_metrics().await;
    assert!(text(&page).contains("\ncontainer_scrape_error 1\n") && text(&page).contains("\nmachine_memory_bytes{"));
}

#[tokio::test(start_paused = true)]
async fn who_asks_at_the_same_time_shares_a_reading() {
    let house = Fixture::new(vec![pod("u1", "web")], None);
    let pages = futures::future::join_all((0..50).map(|_| house.provider.resource_metrics())).await;
    assert!(pages.iter().all(|page| page.as_ptr() == pages[0].as_ptr()), "the same bytes");
    assert_eq!(house.readings(), 1);
    // A deep collection serves shallower requests while it is fresh.
    house.provider.cadvisor_metrics().await;
    house.provider.summary(Form::Short).await.expect("a page");
    assert_eq!(house.readings(), 2);
}

#[tokio::test]
async fn logs_of_containers_are_measured() {
    let house = Fixture::new(vec![pod("u1", "web")], None);
    let logs = house.disk.path().join("main");
    std::fs::create_dir(&logs).expect("made");
    std::fs::write(logs.join("0.log"), vec![b'x'; 100_000]).expect("written");
    let measured = async {
        loop {
            let page = summary(&house).await;
            if let Some(used) = page["pods"][0]["containers"][0]["logs"]["usedBytes"].as_u64() {
                return (used, page);
            }
            tokio::task::yield_now().await;
        }
    };
    let (used, page) = tokio::time::timeout(Duration::from_secs(30), measured).await.expect("measured");
    assert!((100_000..200_000).contains(&used), "{page:#}");
    assert!(page["pods"][0]["ephemeral-storage"]["usedBytes"].as_u64().is_some_and(|all| all >= used), "{page:#}");
}
