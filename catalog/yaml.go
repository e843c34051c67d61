package catalog

import (
	"encoding/json"

	"go.yaml.in/yaml/v3"
)

// value is a schema in YAML as encoding/json would decode it. Numbers keep their digits.
func (p *parser) value(n *yaml.Node) any {
	switch n.Kind {
	case yaml.MappingNode:
		return p.mapping(n)
	case yaml.SequenceNode:
		list := make([]any, 0, len(n.Content))
		for _, item := range n.Content {
			list = append(list, p.value(item))
		}
		return list
	case yaml.ScalarNode:
		return p.scalar(n)
	}
	p.fail(n, "put the shared part under $defs, and name it by $ref", "a schema with a YAML alias")
	return nil
}

func (p *parser) mapping(n *yaml.Node) any {
	object := map[string]any{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
			p.fail(k, "write the keys one by one", "a schema's key is a text")
			continue
		}
		if _, twice := object[k.Value]; twice {
			p.fail(k, "keep one of them", "key %s is given twice", k.Value)
		}
		object[k.Value] = p.value(v)
	}
	return object
}

func (p *parser) scalar(n *yaml.Node) any {
	switch n.Tag {
	case "!!str", "!!timestamp":
		return n.Value
	case "!!null":
		return nil
	case "!!bool":
		var b bool
		if err := n.Decode(&b); err == nil {
			return b
		}
	case "!!int", "!!float":
		if json.Valid([]byte(n.Value)) {
			return json.Number(n.Value)
		}
	}
	p.fail(n, "write a number as JSON does, and quote a text", "%q is no value of JSON", n.Value)
	return nil
}
