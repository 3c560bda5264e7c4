"""Check the objects of a JSON list on standard input: those of Kubernetes with the schemas of each
of VERSIONS; with --operators those of operators, by models that were made from their CRDs. For the
Python of $SHARDD_KUBERNETES_VENV. Prints a JSON object: what is wrong, by number."""
import json
import sys

# restartPolicy of an init container works since 1.29.
VERSIONS = ("1.29", "1.37")


def operators():
    from cloudcoil.models.cert_manager import v1 as cert_manager
    from cloudcoil.models.prometheus_operator import v1 as prometheus
    return {"Issuer": cert_manager.Issuer, "Certificate": cert_manager.Certificate,
            "PodMonitor": prometheus.PodMonitor}


def check_operator(model, document):
    """A field that the model does not know is lost on the way."""
    back = json.loads(model.model_validate(document).model_dump_json(by_alias=True,
                                                                     exclude_unset=True))
    if back != document:
        raise ValueError(f"fields are unknown: {document} becomes {back}")


def check(document):
    import kubernetes_validate
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def main():
    bad = {}
    models = operators() if "--operators" in sys.argv else {}
    for number, document in enumerate(json.load(sys.stdin)):
        try:
            if document["kind"] in models:
                check_operator(models[document["kind"]], document)
            else:
                check(document)
        except Exception as why:  # of three libraries
            name = f"{document['kind']} {document['metadata']['name']}"
            bad[number] = f"{name}: {str(why).splitlines()[0]}"
    print(json.dumps(bad))


if __name__ == "__main__":
    main()
